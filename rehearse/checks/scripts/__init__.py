"""The checks of a script that was played: each a function of the journal, under the name of the check of a run."""
