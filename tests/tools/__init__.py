"""What only the tests and benches of Tidings itself stand on; what its users test with is `tidings_testing`.

Generated logs (`generated`) and the naive model they are judged by (`model`; `oracle` for a log as it is stored),
simulators of delivery (`delivery` and its parts) and of links (`links`, `link_ports`), stand-ins for the pipeline
(`frames`, `delivering`, `driver`), a disk that loses its power (`power`), floods (`attacks`), and writing many records
quickly (`pouring`).
"""
