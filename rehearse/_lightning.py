"""What rehearsals use of Lightning's privates; the first ones the library uses too, and has in its own table."""

import functools

from course_lib._lightning import COMBINED_LOADER as COMBINED_LOADER
from course_lib._lightning import DATA_FETCHER as DATA_FETCHER
from course_lib._lightning import RESTARTING as RESTARTING
from course_lib._lightning import SHOULD_ACCUMULATE as SHOULD_ACCUMULATE
from course_lib._lightning import STATES_TO_LOAD as STATES_TO_LOAD
from course_lib._lightning import Private

used = functools.partial(Private, user="rehearse")

DATA_SOURCE = used("_FitLoop", "_data_source", "whether the training loader was given or comes from a module")
EPOCHS_BEFORE_AVERAGING = used("StochasticWeightAveraging", "_max_epochs", "the number of epochs that step")
VALIDATION_SOURCE = used("_EvaluationLoop", "_data_source", "whether the validation's loaders were given")
LOADER_STATES = used("CombinedLoader", "_state_dicts", "the states of a trial's loaders")
ROOT_FOLDER = used("Trainer", "_default_root_dir", "a trial, which writes into a folder of its own")
DATA_CONNECTOR = used("Trainer", "_data_connector", "a trial's loaders, which are made as those of another rank")
WANTS_DISTRIBUTED_SAMPLER = used("_DataConnector", "_requires_distributed_sampler", "dealing to a trial's ranks")
PREPARE_LOADER = used("_DataConnector", "_prepare_dataloader", "a trial's loaders, watched as they are made")
ACCELERATOR_CONNECTOR = used("Trainer", "_accelerator_connector", "a trial, which is put on the CPU as some rank")
LAUNCHER = used("DDPStrategy", "_launcher", "a trial, which starts no other ranks")
DDP_OPTIONS = used("DDPStrategy", "_ddp_kwargs", "whether DDP looks for parameters that are not used")
VALIDATION_SECONDS = used("Trainer", "_val_check_time_interval", "whether a run validates, and saves, by the clock")
SAVES_EVERY_STEPS = used("ModelCheckpoint", "_every_n_train_steps", "when a run saves")
SAVES_EVERY_EPOCHS = used("ModelCheckpoint", "_every_n_epochs", "when a run saves")
SAVES_BY_TIME = used("ModelCheckpoint", "_train_time_interval", "when a run saves")
SAVES_AFTER_TRAINING = used("ModelCheckpoint", "_save_on_train_epoch_end", "when a run saves")
CALL_CALLBACKS = used("lightning.pytorch.trainer.call", "_call_callback_hooks", "the hooks of another epoch")
CALL_MODULE = used("lightning.pytorch.trainer.call", "_call_lightning_module_hook", "the hooks of another epoch")
TURN_SAMPLER = used("lightning.pytorch.loops.fit_loop", "_set_sampler_epoch", "the order of another epoch")
PROCESS_LOADER = used("lightning.pytorch.loops.fit_loop", "_process_dataloader", "a loader that is made again")
