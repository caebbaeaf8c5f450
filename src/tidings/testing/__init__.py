"""What Tidings is tested with, shipped so that you can test with it too.

A real space in a temporary directory (`real_space`), its programs as processes to kill and pause (`processes`), the
security suite (`security`), generated logs and the naive model they are judged by (`generated`, `model`), a
disk that loses its power (`power`), and two small tools: waiting for conditions (`waiting`) and writing many records
quickly (`pouring`).
"""
