"""What only a notebook needs: figures, widgets, predictions, exercises, and the refresh of stored outputs."""

import os

from course_lib._job import variables_of_a_job

# A kernel on a cluster runs inside a job, and its Trainers would take themselves for the job's ranks.
for name in variables_of_a_job(os.environ):
    del os.environ[name]
