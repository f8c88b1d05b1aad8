"""The old name of :mod:`selfattn_ext.distributed.dtensor`."""

from ..distributed.dtensor import register_sharding

__all__ = ["register_sharding"]
