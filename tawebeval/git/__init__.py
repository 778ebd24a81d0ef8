"""Checked-out trees of commits, fetched from the URLs of strangers and cached.

An evaluation names a URL and a commit. `cache.RepositoryCache.check_out_commit` returns a
`core.evaluations.Checkout` for them: a read-only tree that nobody removes until it is released.
Commits are fetched at most once, concurrent requests share one fetch, and the least recently used
repositories and checkouts are evicted.

`cache.RepositoryCache`: all repositories and checkouts, within a size on the disk.
`repository.BareRepository`: one bare repository: its fetches and markers of commits; `GitServers`:
branches of repositories, and reasons of failed fetches. `fetch_limits`: the time and bytes of
fetches, and the size of a commit's tree, from the output of git, before it is checked out. `lfs`:
files in Git LFS. `command.GitRunner`: one git command, hardened, bounded and in a sandbox, and the
classification of its failure. `remotes.RemoteResolver`: the route from a URL to the one permitted
address; `Credential`: a secret of private repositories; `GitKeyring` reads their files.

`daemon.assembly` builds the cache and hands it to evaluations, which know it as a Protocol
(`evaluations.context`) and import nothing of this package. `daemon.doctor` checks git's version
and the credentials; `cli` uses `fetch_limits.TreeLimits` for `tawebeval try`.

Design: docs/design/git.md.
"""
