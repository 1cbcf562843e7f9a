"""Measuring this machine, and fitting the cost model's devices and links to the measurements.

cases.py, kernels.py, collectives.py, transfers.py    the cases, and the functions that run them
clock.py                                              the time of a call, by the CPU's clocks or CUDA events
worker.py, processes.py                               one measuring process; starting several on this machine
samples.py                                            raw measurements as a file that an interrupted run resumes
fit.py, fit_device.py, fit_link.py                    devices and links that predict the measured times
profile.py                                            the whole measurement, as `autopar profile` runs it
"""
