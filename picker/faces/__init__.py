"""Picker's side towards the gateway: in the process of the core, or as several processes beside it.

A face has the ext_proc streams, bodies, templates and tokens; the core has the queue, the index and the ledger. With
`extproc.workers: 1` there is one face, which calls the core directly. With more, each face is a process of its own
that shares the port, and the same calls go over a socket:

    gateway == streams ==> face.py --- begin(Prepared) ---> Asking ~~ channel.py ~~ Answering --- begin ---> the core
                           (child)                          (child)   one socket     (core)                (deciding.py)

`messages.py` is all that is ever said, `protocol.py` how it becomes bytes, `asking.py` and `answering.py` what each
end has to remember. None of these four does any IO. `crew.py` starts the processes, starts them again, and adds up
what they count; `child.py` is what runs in them.
"""
