"""The error tree. A caller's mistake reads ``name: want X, got Y``."""


class KvkernError(Exception):
    """Base of every error that kvkern raises on purpose."""


class ShapeMismatchError(KvkernError, ValueError):
    """A tensor's shape disagrees with the contract or with another argument."""


class LayoutError(KvkernError, ValueError):
    """A tensor's strides or overlap are not what the contract allows."""


class DeviceError(KvkernError, ValueError):
    """A tensor lives on another device than the rest of the call."""


class ArgumentError(KvkernError, ValueError):
    """A value is outside what the contract allows."""


class UnsupportedDtypeError(KvkernError, TypeError):
    """A tensor's dtype is not one that the contract lists."""


class UnsupportedError(KvkernError, RuntimeError):
    """A valid call that no backend can run; the message gives each backend's reason."""


class OutOfPagesError(KvkernError, RuntimeError):
    """The page pool is too small for the request; nothing has changed."""
