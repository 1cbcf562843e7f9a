"""Measuring this machine, and fitting the cost model's devices and links to it.

cases.py, kernels.py, collectives.py, transfers.py    what is measured, and how each case is run
clock.py                                              how long a call takes: on the CPU's clocks, by CUDA events
worker.py, processes.py                               one measuring process; starting several on this machine
samples.py                                            raw measurements as a file that an interrupted run resumes
fit.py, fit_device.py, fit_link.py                    devices and links whose predictions are those times
profile.py                                            all of it: what `autopar profile` does
"""
