"""Which rows of the cache stay when its budget is spent: policies as pure functions. See docs/eviction.md."""

from kvjax.eviction.budget import Budget, pyramid, share_of
from kvjax.eviction.heads import adakv
from kvjax.eviction.policy import Policy
from kvjax.eviction.registry import POLICIES, named
from kvjax.eviction.rotation import angles, rerotate, rotate
from kvjax.eviction.rows import Moments, Rows, add_queries, no_moments
from kvjax.eviction.selection import gather, kept_mask, scored, select

__all__ = [
    "POLICIES",
    "Budget",
    "Moments",
    "Policy",
    "Rows",
    "adakv",
    "add_queries",
    "angles",
    "gather",
    "kept_mask",
    "named",
    "no_moments",
    "pyramid",
    "rerotate",
    "rotate",
    "scored",
    "select",
    "share_of",
]
