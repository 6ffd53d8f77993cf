"""The small reference model, as the reference's own tests have it."""

from tests.reference.conftest import ids, model, small_checkpoint

__all__ = ["ids", "model", "small_checkpoint"]
