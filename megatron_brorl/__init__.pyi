from megatron_brorl.api.engine import Engine as Engine
from megatron_brorl.api.runs import load_run as load_run
from megatron_brorl.api.scores import score as score
from megatron_brorl.api.training import train as train
from megatron_brorl.errors import UserError as UserError
from megatron_brorl.train.callbacks import Callback as Callback
from megatron_brorl.train.callbacks import StopTraining as StopTraining

__version__: str
