"""Control groups, versions 1 and 2: limits and usage of whole process trees (cgroups(7)).

The daemon calls `manager.open_cgroups` at its start, while it still is root. The result is a
`CgroupManager`: it makes one `EvaluationCgroup` for each evaluation, and tells the operator which
resources are not limited, and the remedy. A machine without usable cgroups is no error: resource
limits of single processes then hold instead (`sandbox.base`). For lasting evaluations the starter
has opened the cgroups, and the daemon uses them by `manager.open_starter_cgroups`.

- `filesystem`: `CgroupDirectory` is one cgroup, `CgroupOperations` changes cgroups (a seam for
  tests), `find_cgroups_of_process` finds the hierarchies of both versions.
- `controllers`: a `CgroupController` sets one limit or reads one figure, with a class for each
  version.
- `parents`: a `ParentCgroup` is the cgroup below which the daemon makes those of evaluations.
- `manager`: detection of the controllers, and the cgroup of one evaluation.
"""
