import sys, os, time
from functools import partial
from tests import faults
from tests.launch import outcomes
import bagua_ref
KINDS={"workers":faults.workers,"fork":faults.fork,"cfork":faults.fork_unseen,"program":faults.start_a_program,"none":lambda:None}
def train(kind, algorithm):
    if kind=="server": faults.serve_the_store()
    bagua_ref.init_process_group(timeout=12)
    t=faults.begin(algorithm)
    b=time.monotonic()
    if kind=="server": faults.serves_and_dies(t)
    else: faults.dies_before_its_children(t, KINDS[kind])
    return t.errors[:2], round(time.monotonic()-b,2)
if __name__=="__main__":
    sel=sys.argv[1].split(",") if len(sys.argv)>1 and sys.argv[1] else [*KINDS,"server"]
    algs=sys.argv[2].split(",") if len(sys.argv)>2 else ["gradient_allreduce","low_precision_decentralized"]
    for g in (False,True):
        for k in sel:
            for a in algs:
                e=outcomes(train,2,k,a,init=False,limit=60,over_gloo=g)
                o=e[1 if k=="server" else 0]
                print("gloo" if g else "shm ",k,a,o.result[1] if o.result else o.traceback[-300:],"|",o.result[0][0][:230] if o.result and o.result[0] else "",flush=True)
