"""Which kernel computes a problem, and why: `explain` asks the functions that the launchers obey."""

from fuseline.native.gpus import GPUS, Gpu
from fuseline.ops.plans.attention import attention_plans
from fuseline.ops.plans.explanation import PLANNED, Explanation, explain
from fuseline.ops.plans.plan import Plan
from fuseline.ops.plans.rows import NORMS

__all__ = ["GPUS", "NORMS", "PLANNED", "Explanation", "Gpu", "Plan", "attention_plans", "explain"]
