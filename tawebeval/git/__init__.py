"""From a URL and a commit to a tree of files, cached.

`cache.Repositories` is what evaluations ask, by way of a protocol of theirs: it returns a
checked-out tree, fetches at most once what many want at the same time, and evicts what was not used
for longest. `repository` is one bare repository on the disk, `checkouts` are trees that were
checked out of them, `commits` and `trees` read what git prints.

`command` runs git, hardened and in a sandbox; `gitwords` says what its complaints mean. `remotes`
looks a host up once and binds git to the address found; `credentials` and `keyring` have the
secrets of private repositories.
"""
