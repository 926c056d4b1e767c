"""Checkpoints of every format, read tensor by tensor and put on the devices."""

from kvjax.checkpoints.place import init_params as init_params
from kvjax.checkpoints.place import load_params as load_params
from kvjax.checkpoints.resolve import open_checkpoint as open_checkpoint
from kvjax.checkpoints.source import TensorSource as TensorSource
