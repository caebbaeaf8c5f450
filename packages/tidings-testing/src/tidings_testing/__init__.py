"""What Tidings is tested with, shipped so that you can test with it too.

A real space in a temporary directory (`real_space`), its programs as processes to kill and pause (`processes`), a TCP
proxy that misbehaves (`proxy`), a history of what was sent and read and the check that it keeps every promise
(`history`), a cluster (`cluster`), network partitions (`partition`), the suites that attack a space (`security`) and a
link (`links`), and waiting for conditions (`waiting`).
"""
