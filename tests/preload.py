"""Imported once by the fork server: every test process then starts warm, in a fraction of a second."""

import torch
import torch._dynamo
import torch.distributed
from torch.nn.parallel import DistributedDataParallel  # noqa: F401

import hdet  # noqa: F401

torch.set_num_threads(1)
_p = torch.nn.Parameter(torch.ones(2))
_p.grad = torch.ones(2)
torch.optim.AdamW([_p]).step()
