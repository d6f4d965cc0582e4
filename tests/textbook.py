"""LRU and ARC as their authors tell them, one access at a time. Slow, plain, and sharing nothing with kvtier."""

from collections import OrderedDict


class TextbookLRU:
    """`access` says whether it was a hit."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.order: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, x: int) -> bool:
        return x in self.order

    def access(self, x: int) -> bool:
        if x in self.order:
            self.order.move_to_end(x)
            return True
        if len(self.order) == self.blocks:
            self.order.popitem(last=False)
        self.order[x] = None
        return False


class TextbookARC:
    """Megiddo and Modha, "ARC: a self-tuning, low overhead replacement cache", FAST '03, figure 4."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.p = 0.0
        self.t1, self.t2, self.b1, self.b2 = (OrderedDict[int, None]() for _ in range(4))

    def __contains__(self, x: int) -> bool:
        return x in self.t1 or x in self.t2

    def access(self, x: int) -> bool:
        c, t1, t2, b1, b2 = self.c, self.t1, self.t2, self.b1, self.b2
        if x in t1 or x in t2:  # I
            (t1 if x in t1 else t2).pop(x)
            t2[x] = None
            return True
        if x in b1:  # II
            self.p = min(self.p + max(len(b2) / len(b1), 1), c)
            self.replace(x)
            del b1[x]
            t2[x] = None
        elif x in b2:  # III
            self.p = max(self.p - max(len(b1) / len(b2), 1), 0)
            self.replace(x)
            del b2[x]
            t2[x] = None
        else:  # IV
            l1, l2 = len(t1) + len(b1), len(t2) + len(b2)
            if l1 == c:  # A
                if len(t1) < c:
                    b1.popitem(last=False)
                    self.replace(x)
                else:
                    t1.popitem(last=False)
            elif l1 + l2 >= c:  # B
                if l1 + l2 == 2 * c:
                    b2.popitem(last=False)
                self.replace(x)
            t1[x] = None
        return False

    def replace(self, x: int) -> None:
        size = len(self.t1)
        if size >= 1 and ((x in self.b2 and size == self.p) or size > self.p):
            self.b1[self.t1.popitem(last=False)[0]] = None
        else:
            self.b2[self.t2.popitem(last=False)[0]] = None
