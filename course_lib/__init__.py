"""How batches of data reach an optimizer: the pieces of *Every Batch Counts*, to be imported one topic at a time.

- ``course_lib.steps``: count a run's optimizer steps before it starts (``plan_steps``, ``max_steps_for``).
- ``course_lib.launch``: run a function on several ranks from a notebook, a script or a test (``run_ranks``).
- ``course_lib.devices``: the GPU if it can be used, else the CPU, and why (``usable_device``).
- ``course_lib.datasets``: small real data, offline, and integers on which a batch can be read (``load_digits``,
  ``load_words``, ``Integers``, ``IntegerStream``).
- ``course_lib.loader``: torch's DataLoader, to be read in one sitting (``MiniDataLoader``).
- ``course_lib.pipeline``: when each batch was fetched, waited for and delivered (``trace``, ``predict_throughput``).
- ``course_lib.accumulation``: small batches whose gradient is the big batch's (``windows``, ``accumulate``).
- ``course_lib.samplers``: batch samplers that every rank can share (``ShuffledBatchSampler``, ``ShardedBatchSampler``).
- ``course_lib.conformance``: prove a batch sampler on any number of ranks (``assert_batch_sampler``).
- ``course_lib.resume``: a loader that goes on where it was stopped (``ResumableDataLoader``).
- ``course_lib.skipping``: skip a bad step on all ranks, so that nothing of it stays (``StepGuard``, ``vote``).
- ``course_lib.memory``: where a step's memory goes, measured or predicted, and what fits (``measure_peak``,
  ``predict_peak``, ``find_batch_size``).
- ``course_lib.leaks``: what grows from step to step, and who holds it (``watch_growth``).
- ``course_lib.schedules``: sizes that grow and batches that shrink, also within an epoch (``SizeSchedule``,
  ``ScheduledBatchSampler``).
- ``course_lib.callbacks``: the topics as Lightning callbacks (``StepAudit``, ``ExactAccumulation``,
  ``SkipBadSteps``, ``SizeScheduleDataModule``, ``ExactResume``); needs the extra ``lightning``.

``import course_lib`` itself loads nothing.
"""

__version__ = "0.2.0"
