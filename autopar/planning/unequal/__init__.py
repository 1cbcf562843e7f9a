"""Pipelines whose positions are not alike: submeshes of several sizes, and groups of unlike nodes.

    decisions -> terms     what is fixed before stages are cut: shapes of submeshes, micro-batches, ZeRO stage, ...
      -> seat_costs        what every block costs on a rank of each shape
      -> bounds            seconds that no pipeline under given terms can undercut
      -> problem           the best pipeline under given terms, as one problem of search.inter_op
      -> search            terms in the order of their bounds, until none can win

As in Alpa (Zheng et al., OSDI 2022, section 5.2) a submesh is part of one node, or some whole nodes, of one group.
"""
