# SPDX-License-Identifier: Apache-2.0
"""Time every installed format beside torchao and beside a copy: ``python -m benchmarks --help``."""
