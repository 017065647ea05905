"""The error of this package: each message says what, why, and what to do."""

from __future__ import annotations


class FrozenPolicyError(ValueError):
    """A folder that is no frozen policy or is damaged, or an observation or state that a policy cannot take."""
