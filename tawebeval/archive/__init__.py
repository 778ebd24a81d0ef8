"""The archive: ended evaluations on the disk, as compressed JSON Lines.

An archived evaluation is the same evaluation with its events in one compressed file and its row
kept. The package knows neither `Evaluation` nor the store: `evaluations` hands it the events of an
evaluation that has ended, and the rows as `ArchiveRows`.

- `files`: the format of the files: events in zstd frames of bounded size, with an index of the
  frames, so that a page decompresses a few of them; and the submitted files, for a rerun.
- `archive`: `EvaluationArchive`: writes, removes and reads, in threads.

Bounds, whatever evaluators print and clients ask for:

- Memory: of an evaluation that is archived, one segment of its events; of each of two reads a page
  and a frame, which has `UNCOMPRESSED_FRAME_BYTES` or one event.
- Disk: `archive.size`, counted by blocks and with a fixed cost for each evaluation, and one
  evaluation more for a moment. The caller that holds most loses its oldest evaluations.
- Time: each caller has one of the two threads that read at a time; others wait in fair turns.
"""
