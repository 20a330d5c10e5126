# SPDX-License-Identifier: Apache-2.0
"""Every error te-proto and its plugins raise for a caller's mistake.

A message names the format, the argument, the rule with its number, what was given and what to do.
Each class also derives from the built-in a caller would expect, so ``except ValueError`` works.
This module imports neither torch nor triton.
"""

from __future__ import annotations


class TeError(Exception):
    """Base of all errors of te-proto and its plugins."""


class ShapeError(TeError, ValueError):
    """A shape breaks a rule of the format, such as a multiple it needs."""


class DtypeError(TeError, TypeError):
    """A tensor has a dtype that the operation does not take."""


class DeviceError(TeError, ValueError):
    """A device is missing, or is one where the operation cannot run."""


class UsageError(TeError, ValueError):
    """A plane (rowwise or columnwise) is asked for that the tensor does not hold."""


class LayoutError(TeError, ValueError):
    """Inner tensors do not match the layout that their quantizer describes."""


class QuantizerError(TeError, ValueError):
    """A quantizer option, or a pair of options, is not one the format has."""


class FallbackError(TeError, RuntimeError):
    """An operation would dequantize, and the fallback policy is ``"error"``."""


class UnknownFormatError(TeError, LookupError):
    """No installed distribution provides a format of that name."""


class PluginError(TeError, ImportError):
    """A format plugin is installed but cannot be used."""
