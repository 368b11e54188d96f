"""The measuring instrument of `jaxserve bench`.

    datasets, traces -> workload -> load (client) -> records -> metrics -> result -> table, compare, report
                                      sampler -> series of the server ------^

Only `offline` knows the engine. Everything else sees a server through HTTP alone, whatever engine it runs.
"""
