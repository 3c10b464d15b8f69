"""The checks of a script that was rehearsed: each a function of the journal, under the name of the check of a run."""
