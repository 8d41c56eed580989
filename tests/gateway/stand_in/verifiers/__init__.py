"""A stand-in for the package `verifiers` 0.4.0: what `verlite.gateway.verifiers_process` uses of
it, with the names, arguments and fields that the real one has. `test_the_real_package` tries that.
"""

__version__ = "0.4.0"
