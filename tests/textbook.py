"""Policies as their authors tell them, one access at a time. Slow, plain, and sharing nothing with kvtier."""

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


class TextbookFIFO:
    """Who came first leaves first."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.queue: OrderedDict[int, None] = OrderedDict()

    def __contains__(self, x: int) -> bool:
        return x in self.queue

    def access(self, x: int) -> bool:
        if x in self.queue:
            return True
        if len(self.queue) == self.blocks:
            self.queue.popitem(last=False)
        self.queue[x] = None
        return False


class TextbookLFU:
    """Who was used least often leaves first; of those alike, who has been so for longest. Counts end with residence."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.uses: dict[int, int] = {}
        self.alike: dict[int, OrderedDict[int, None]] = {}

    def __contains__(self, x: int) -> bool:
        return x in self.uses

    def access(self, x: int) -> bool:
        before = self.uses.get(x, 0)
        if before:
            self.drop(x)
        elif len(self.uses) == self.blocks:
            self.drop(next(iter(self.alike[min(self.alike)])))
        self.uses[x] = before + 1
        self.alike.setdefault(before + 1, OrderedDict())[x] = None
        return before > 0

    def drop(self, x: int) -> None:
        uses = self.uses.pop(x)
        del self.alike[uses][x]
        if not self.alike[uses]:
            del self.alike[uses]


class TextbookTwoQ:
    """Johnson and Shasha, VLDB '94, full version, Kin = c/4 and Kout = c/2."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.a1in, self.a1out, self.am = (OrderedDict[int, None]() for _ in range(3))

    def __contains__(self, x: int) -> bool:
        return x in self.a1in or x in self.am

    def access(self, x: int) -> bool:
        if x in self.am:
            self.am.move_to_end(x)
            return True
        if x in self.a1in:
            return True
        remembered = x in self.a1out
        self.a1out.pop(x, None)
        if len(self.a1in) + len(self.am) == self.c:
            if len(self.a1in) > self.c // 4 or not self.am:
                self.a1out[self.a1in.popitem(last=False)[0]] = None
                if len(self.a1out) > self.c // 2:
                    self.a1out.popitem(last=False)
            else:
                self.am.popitem(last=False)
        (self.am if remembered else self.a1in)[x] = None
        return False


class TextbookSIEVE:
    """Zhang et al., NSDI '24, algorithm 1, on a plain list (oldest first) with the hand as a position in it."""

    def __init__(self, blocks: int) -> None:
        self.blocks = blocks
        self.queue: list[int] = []
        self.visited: dict[int, bool] = {}
        self.hand = 0

    def __contains__(self, x: int) -> bool:
        return x in self.visited

    def access(self, x: int) -> bool:
        if x in self.visited:
            self.visited[x] = True
            return True
        if len(self.queue) == self.blocks:
            while True:
                self.hand %= self.blocks
                if not self.visited[self.queue[self.hand]]:
                    break
                self.visited[self.queue[self.hand]] = False
                self.hand += 1
            del self.visited[self.queue.pop(self.hand)]
            if self.hand == self.blocks - 1:
                self.hand = 0
        self.queue.append(x)
        self.visited[x] = False
        return False


class TextbookS3FIFO:
    """Yang et al., SOSP '23, algorithm 1; who moves to M has its count cleared (section 4.1). One leaves at a time."""

    def __init__(self, c: int) -> None:
        self.c = c
        self.s, self.m, self.g = (OrderedDict[int, int]() for _ in range(3))  # block -> uses

    def __contains__(self, x: int) -> bool:
        return x in self.s or x in self.m

    def access(self, x: int) -> bool:
        for queue in (self.s, self.m):
            if x in queue:
                queue[x] = min(queue[x] + 1, 3)
                return True
        if len(self.s) + len(self.m) == self.c:
            self.evict()
        (self.s if self.g.pop(x, None) is None else self.m)[x] = 0
        return False

    def evict(self) -> None:
        while len(self.s) >= max(1, self.c // 10) or not self.m:
            x, uses = self.s.popitem(last=False)
            if uses <= 1:
                self.g[x] = 0
                if len(self.g) > self.c - self.c // 10:
                    self.g.popitem(last=False)
                return
            self.m[x] = 0
        while True:
            x, uses = self.m.popitem(last=False)
            if not uses:
                return
            self.m[x] = uses - 1
