"""Modules: thin shells that own parameters."""

from .dynamic_routing import DynamicRouting

__all__ = ["DynamicRouting"]
