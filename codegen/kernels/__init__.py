"""Fused Triton kernels, one file per operation, each with its formula and its torch reference.

The folder is copied beside generated programs and imported there as `kernels`, here as `codegen.kernels`:
its files import one another relatively and nothing else but torch, and Triton where it is installed.

Where lines belong, from what all kernels share to what one has:

    dispatch.py                          is Triton there, may it take these tensors, do they fit, tensors as rows;
                                         kernels that keep their launches
    tile.py, tuning.py, tuning_file.py   a kernel's candidates of launch parameters, and which of them is launched
    chunk_table.py                       many tensors in one launch: adamw.py, grad_norm.py
    norm_kernels.py, norm_launches.py    layer and RMS norms, with the addition to the residual stream before or after
    column_sums.py                       partial sums of a weight's and a bias's gradient, added up
    gated.py, gelu.py                    the kernels of SwiGLU and GeGLU, and GELU's two forms
    counting_sort.py, grouped_linear.py, token_sums.py    experts' rows: sorted, multiplied, summed by token
    online_softmax.py                    maximum and sum of exponentials of a row: both losses
    <operation>.py                       its formula and reference, what callers see, what autograd saves
    <operation>_kernels.py               kernels and launches that several operations have, or that make a file long

A Pattern of codegen/fusion is the record of a kernel: which calls it replaces, what it saves, what it costs.
A new operation is a file with its formula, its candidate tiles, `<operation>_reference`, the function, kernels named
`_<what>_kernel`, and an autograd function that saves as little as it can. A tile's arithmetic that two kernels have to
the bit is a `@jit` function in a file of its own or of the family; where roundings differ, each has its own lines.
"""
