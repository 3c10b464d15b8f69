"""A file for each check: a function of a run that returns a judgement, or a trial that returns one."""
