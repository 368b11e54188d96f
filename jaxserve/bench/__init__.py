"""What is behind `jaxserve bench`: the measuring instrument.

    datasets, traces -> workload -> load (client) -> records -> metrics -> result -> table, compare, report
                                      sampler -> series of the server ------^

Nothing here but `offline` knows the engine: a server, ours or another's, is seen through HTTP alone.
"""
