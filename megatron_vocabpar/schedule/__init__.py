"""What runs when: from the words of a schedule to a plan that every rank runs. Needs no torch.

A schedule is data: for each rank its passes, in order. This one is vocab-2's, for 2 ranks and 3 microbatches.
``1F0`` is the forward of stage 1 for microbatch 0, ``0S2`` the output layer on rank 0's shard of the
vocabulary for microbatch 2. Its two rows, then each rank's passes in time (``i`` is IF, ``o`` is IB):

    0IF0 0IF1 0F0 0IF2 0F1 0S0 0F2 0S1 0T0 0B0 0S2 0T1 0IB0 0B1 0T2 0IB1 0B2 0IB2
    1IF0 1IF1 1IF2 1F0 1S0 1F1 1L0 1B0 1S1 1F2 1L1 1B1 1S2 1T0 1L2 1B2 1T1 1IB0 1T2 1IB1 1IB2

       |0                  |50                 |100
    0| iiF0iF1··S0F2··S1T     B0······S2To  B1······To B2······o
    1| iii  F0··S0F1··LB0·····S1F2··LB1·····S2TLB2·····ToTo    o

What each sub-room does to it, in the order in which to read them:

1. ``words/`` says what the passes are (``passes.py``), where stages live (``placement.py``), what vocab-2 is
   (``methods.py``: the chain ``C0 S C1 B``, and beside it ``C1 L CG B`` and T) and what must come before what
   (``dependencies.py``: 1B0 waits for 1F0, for C1 of microbatch 0 and for its loss function, 1L0).
2. ``times/`` says how long passes take: here F 10 ms, S 5 ms, B 20 ms, T 2.5 ms, L none.
3. ``make/`` answers a request. ``building_block.py`` places the passes of one microbatch, repeated every
   38.5 ms, the work of one rank: 0F0 at 0.3 ms, 1F0 at 10.6, 1S0 at 20.9, 1B0 at 64.4, 0B0 at 87.3.
   ``list_scheduling.py`` plays three of these blocks, and rank 0 runs T in its gaps.
   Where F and B hide each other's exchange between experts, ``pair_scheduling.py`` runs them together.
   The iteration takes 140.2 ms; ``bounds.py`` says that no order with this memory takes less than 137.2 ms.
4. ``play/`` plays it. ``lower.py`` adds communication, so that rank 1's row begins
   ``1IF0 1CI0 1IF1 1CI1 1IF2 1RECV_F0``; ``events.py`` finds when each pass runs, ``memory.py`` what a rank
   holds, and ``hang.py`` whether GPUs could hang.
5. ``check/`` checks the schedule and its program against the rules, one by one.
6. ``plan.py`` keeps the schedule with its costs and its program, ``simulate.py`` reads times off it,
   ``serialize.py`` writes and reads it, ``draw/`` draws it. ``data/`` holds the schemas of files.

Imports point from later floors to earlier ones: words, data, times, play, check, the files here, make, draw.
"""
