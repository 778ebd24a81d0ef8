"""The archive: ended evaluations on the disk, as compressed JSON Lines with an index.

The package knows no `Evaluation`. `evaluations` hands it events and documents, and reads them again
when an evaluation is gone from memory. Losing the directory loses the archive and nothing else.

- `files`: the format of a file: zstd frames of bounded size, and an index of the frames, so that a
  page decodes a few of them. `zstdcat` prints a file as JSON Lines.
- `spool`: `SpooledRecording`, the events of an evaluation that has not ended. It is complete in the
  page cache after each write, so an end of the process loses no event that was written.
- `index`: `ArchiveIndex`, the SQLite table for lists and for removals by age and size. A damaged
  one is made again from the files.
- `store`: `ArchiveStore`, all three in one directory, with the bounds. It blocks, and belongs to
  one thread.
- `recorder`: `DiskArchive` in the reactor's thread: the bounded queue between rings and the store,
  the pauses of evaluators while it is full, and the calls of threads that read.

`archive` and `evaluation_files` are to replace all but `submissions`: `EvaluationArchive`
compresses an evaluation once it has ended, beside its row in the store. Nothing uses them yet.

`daemon.assembly` makes the `DiskArchive` if `archive.enabled` is set.

Bounds, whatever evaluators print and clients ask for:

- Memory: `recorder.MAX_QUEUED_BYTES` of waiting events, and as many in journals, which give back
  only what is written; for each of two reading threads a few frames, of `MAX_FRAME_BYTES` and one
  turn of the parser each; 16 bytes for each frame of a running recording; 500 rows of a list, of 25
  KiB at most.
- Disk: `archive.size` for files, rows and recordings, counted by blocks and with a fixed cost for
  each evaluation; up to 16 MiB of SQLite's log. An excess is removed within a second or so.
- Reactor: no file and no SQLite; a batch costs a function call and an entry in a list. Only the
  start waits for the disk.
"""
