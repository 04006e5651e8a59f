"""How much of one endpoint's prefill a class may take while others have work there.

Queueing is fair over the whole pool; this keeps it fair on one endpoint, where a hot prefix draws all requests of a
class to the few endpoints that hold it.

Let B_k be the prefill tokens that class k has booked on the endpoint and that are not done, B their sum, and q_k
its quantum. Present are the classes with a request there that has not ended (it may be decoding), and always the
class c that asks. When c would bring u more tokens, with B' = B + u and Q the sum of the quanta of those present:

    surplus   = B_c + u - q_c / Q * B'
    surcharge = max(0, surplus - bound) * price        (weighted tokens, added to the endpoint's cost for c)

- A class that is alone on an endpoint has a share of 1 and a surplus of 0: affinity is never hindered for nothing.
- The surpluses of those present sum up to 0, so there is always one for whom the endpoint is no dearer.
- If c is sent there although another endpoint would have cost `more` without any surcharge, then
  surplus <= bound + more / price: with a price p, the hot class passes its bound by no more than 1/p of what its
  cached tokens save. It gives way request by request; nothing is switched.
"""

from __future__ import annotations

from msgspec import Struct

from picker.pool.ledger import Load


class Claim(Struct, frozen=True):
    """A class with such a bound, as it comes to choose: `holder` is its name in the ledger, `weight` its quantum."""

    holder: str
    weight: int
    bound: int
    price: float

    def surplus(self, load: Load, tokens: int) -> float:
        """Tokens beyond its share that the class would have there with `tokens` more; negative below its share."""
        held = load.held
        mine = held.get(self.holder)
        others = sum(other.weight for name, other in held.items() if name != self.holder)
        share = self.weight / (self.weight + others)
        return (mine.prefill_tokens if mine else 0) + tokens - share * (load.prefill_tokens + tokens)

    def surcharge(self, load: Load, tokens: int) -> float:
        """What the endpoint costs on top, in weighted tokens."""
        over = self.surplus(load, tokens) - self.bound
        return over * self.price if over > 0 else 0.0
