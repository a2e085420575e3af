from megatron_brorl.errors import UserError as UserError
from megatron_brorl.face.engine import Engine as Engine
from megatron_brorl.face.runs import load_run as load_run
from megatron_brorl.face.scores import score as score
from megatron_brorl.face.training import train as train
from megatron_brorl.train.callbacks import Callback as Callback
from megatron_brorl.train.callbacks import StopTraining as StopTraining

__version__: str
