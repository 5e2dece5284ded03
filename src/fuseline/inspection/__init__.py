"""The compiled kernels looked at: what each takes, how many fit on a multiprocessor, its SASS and PTX."""

from fuseline.inspection.built import Built, find_built
from fuseline.inspection.cuobjdump import Cuobjdump, find_cuobjdump
from fuseline.inspection.gpus import GPUS, Gpu, choose_gpu, find_gpu
from fuseline.inspection.kernels import Kernel, Kernels, read_kernels
from fuseline.inspection.occupancy import Occupancy, occupancy

__all__ = [
    "GPUS",
    "Built",
    "Cuobjdump",
    "Gpu",
    "Kernel",
    "Kernels",
    "Occupancy",
    "choose_gpu",
    "find_built",
    "find_cuobjdump",
    "find_gpu",
    "occupancy",
    "read_kernels",
]
