"""Control groups, versions 1 and 2: limits and figures of whole process trees.

`group.open_cgroups` finds what the daemon may use, by `filesystem` (where cgroups are mounted),
`parents` (the cgroup below which the daemon makes those of evaluations) and `controllers` (memory,
pids and cpu, in both versions). The result makes one group for each evaluation, and says what is
not held and what the operator can do about it.
"""
