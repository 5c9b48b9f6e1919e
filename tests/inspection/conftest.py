from tests.tiny import own

__all__ = ["own"]
