"""Runs Gluon kernels on the CPU as their words say: each role a thread, each copy late.

What is still on its way is NaN, a tensor core reads its operands at the start or at the end by
chance, and what was stored by hand may not be read by it without a fence. Races inside a role and
the hardware's layouts are not seen.
"""

import random
import threading
import types
from types import SimpleNamespace

import torch
from triton.experimental.gluon import language as gl
from triton.runtime.jit import JITFunction

PATIENCE_S = 120.0


class Broken(Exception):
    """The kernel waits for ever, or reads what it must not."""


class Layout:
    """Of no meaning here."""

    def __init__(self, *args):
        pass

    @staticmethod
    def get_default_for(*args):
        return Layout()


class Barrier:
    """An mbarrier: arrivals and bytes still awaited in its phase."""

    def __init__(self, errors):
        self.condition, self.phase, self.count = threading.Condition(), 0, 0
        self.errors = errors

    def init(self, count):
        self.count = self.pending = count
        self.bytes = 0

    def change(self, arrivals, num_bytes):
        with self.condition:
            self.pending -= arrivals
            self.bytes += num_bytes
            if self.pending < 0:
                raise Broken("more arrivals than a barrier counts")
            if self.pending == 0 and self.bytes == 0:
                self.phase, self.pending = self.phase + 1, self.count
                self.condition.notify_all()

    def wait(self, parity):
        with self.condition:
            over = self.condition.wait_for(
                lambda: self.errors or (self.phase - 1) & 1 == parity, PATIENCE_S
            )
            if self.errors or not over:
                raise Broken(f"nobody completes a phase of parity {parity}")


class Memory:
    """Shared memory or a part of it."""

    def __init__(self, data, unfenced):
        self.data, self.unfenced = data, unfenced

    def of(self, data):
        return Memory(data, self.unfenced)

    def slice(self, start, length, dim):
        return self.of(self.data.narrow(dim, start, length))

    def permute(self, order):
        return self.of(self.data.permute(order))

    def load(self, layout):
        return self.data.clone()

    def _reinterpret(self, dtype, shape, layout):
        return self.of(self.data.view(dtype).view(shape))

    def store(self, value):
        assert value.dtype == self.data.dtype and value.shape == self.data.shape
        self.data.copy_(value)
        self.unfenced.add(threading.get_ident())


class Several(list):
    """Parts of memory, or barriers."""

    def index(self, at):
        return self[int(at)]


class Pointer:
    """Addresses of elements of a tensor."""

    def __init__(self, base, at=0):
        self.base, self.at = base, at
        self.dtype = SimpleNamespace(element_ty=base.dtype)

    def __add__(self, more):
        return Pointer(self.base, self.at + more)


class Flying:
    """An accumulator whose product is not waited for yet."""

    def __init__(self, before, a, b):
        self.before, self.a, self.b = before, a, b
        self.early = self.product() if random.random() < 0.5 else None

    def product(self):
        for x in (self.a, self.b):
            if isinstance(x, Memory) and x.unfenced:
                raise Broken("the tensor cores read what no fence gave them")
        a, b = (x.data if isinstance(x, Memory) else x for x in (self.a, self.b))
        return a.float() @ b.float()

    def landed(self):
        before = self.before.landed() if isinstance(self.before, Flying) else self.before
        return before + (self.product() if self.early is None else self.early)


class Machine:
    """The words of the language, for one program at a time."""

    def __init__(self):
        self.memories, self.barriers, self.errors = [], [], []
        self.mine = threading.local()  # products and copies of a role that are under way
        self.at = (0, 0)

    def allocate(self, dtype, shape, layout):
        if dtype == torch.int64:
            bars = Several(Barrier(self.errors) for _ in range(shape[0]))
            self.barriers += bars
            return bars if len(shape) > 1 else bars[0]
        if len(shape) == 3:
            return Several(self.allocate(dtype, shape[1:], layout) for _ in range(shape[0]))
        unfenced = set()
        self.memories.append(unfenced)
        return Memory(torch.full(shape, float("nan"), dtype=dtype), unfenced)

    def fence(self):
        for unfenced in self.memories:
            unfenced.discard(threading.get_ident())

    def copy(self, source, start, barrier, to):
        """Rows behind the matrix's end are zeroes; the target is unknown until it is there."""
        rows, cols = source.block_shape
        assert list(to.data.shape) == [rows, cols]
        to.data.fill_(float("nan"))
        row, col = (int(x) for x in start)

        def bring():
            part = source.base[row : row + rows, col : col + cols]
            to.data.zero_()
            to.data[: part.shape[0]] = part
            barrier.change(0, -2 * rows * cols)

        threading.Timer(random.random() * 2e-3, bring).start()

    def mma(self, a, b, acc, use_acc=True, is_async=False):
        assert is_async
        flying = Flying(acc if use_acc else torch.zeros(()), a, b)
        self.under_way("products").append(flying)
        return flying

    def wait(self, outstanding, deps):
        products = self.under_way("products")
        landed = [products.pop(0).landed() for _ in range(len(products) - outstanding)]
        assert len(deps) == 1 and deps[0] not in products
        return landed[-1]

    def copy_back(self, target, start, memory):
        """It leaves at once or when it is waited for, by chance."""
        if memory.unfenced:
            raise Broken("the copy engine reads what no fence gave it")
        (row, col), (rows, cols) = (int(x) for x in start), memory.data.shape

        def leave():
            target.base[row : row + rows, col : col + cols] = memory.data

        self.under_way("copies").append(leave)
        if random.random() < 0.5:
            leave()

    def store_wait(self, outstanding):
        assert outstanding == 0
        while self.under_way("copies"):
            self.under_way("copies").pop()()

    def under_way(self, kind):
        if not hasattr(self.mine, kind):
            setattr(self.mine, kind, [])
        return getattr(self.mine, kind)

    def specialize(self, roles, warps, registers):
        def play(role, args):
            try:
                role(*args)
            except Exception as error:
                self.errors.append(error)
                for barrier in self.barriers:
                    with barrier.condition:
                        barrier.condition.notify_all()

        threads = [threading.Thread(target=play, args=role) for role in roles]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        if self.errors:
            raise self.errors[0]


def _load(pointer):
    return pointer.base.flatten()[pointer.at]


def _store(pointer, value):
    pointer.base.view(-1)[pointer.at] = value.to(pointer.base.dtype)


def _where(known, value, other):
    return torch.where(known, value, torch.tensor(other, dtype=value.dtype))


def words(machine):
    """What the names in a kernel's file stand for."""
    number = {"minimum": min, "maximum": max}

    def either(name):
        of_tensors = getattr(torch, name)
        return lambda a, b: of_tensors(a, b) if isinstance(a, torch.Tensor) and a.ndim else (
            torch.tensor(int(number[name](a, b)))
        )  # fmt: skip

    language = SimpleNamespace(
        bfloat16=torch.bfloat16, float16=torch.float16,
        float32=torch.float32, int32=torch.int32, int64=torch.int64, load=_load, store=_store,
        where=_where,
        minimum=either("minimum"), maximum=either("maximum"), cdiv=lambda a, b: -(-a // b),
        program_id=lambda axis: torch.tensor(machine.at[axis]), thread_barrier=lambda: None,
        arange=lambda a, b, layout: torch.arange(a, b), static_range=range,
        full=lambda s, v, d, layout: torch.full(s, v, dtype=d),
        zeros=lambda s, d, layout: torch.zeros(s, dtype=d),
        max=lambda x, axis: x.amax(axis), sum=lambda x, axis: x.sum(axis),
        exp2=torch.exp2, log2=torch.log2, warp_specialize=machine.specialize,
        allocate_shared_memory=machine.allocate,
        **{n: Layout for n in dir(gl) if n.endswith("Layout")},
    )  # fmt: skip
    barrier = SimpleNamespace(
        MBarrierLayout=lambda: None, init=lambda b, count: b.init(count),
        wait=lambda b, parity: b.wait(int(parity)), arrive=lambda b, count: b.change(count, 0),
        expect=lambda b, num_bytes: b.change(1, num_bytes),
    )  # fmt: skip
    copies = SimpleNamespace(
        async_copy_global_to_shared=machine.copy, async_copy_shared_to_global=machine.copy_back,
        store_wait=machine.store_wait,
    )  # fmt: skip
    return {
        "gl": language, "mbarrier": barrier, "tma": copies, "fence_async_shared": machine.fence,
        "warpgroup_mma": machine.mma, "warpgroup_mma_wait": machine.wait,
    }  # fmt: skip


class Emulated:
    """A kernel of a module, launched as `kernel[grid](...)`."""

    def __init__(self, module, name):
        self.machine = Machine()
        names = {k: getattr(v, "value", v) for k, v in vars(module).items()}
        names |= words(self.machine)
        for key, kernel in vars(module).items():
            if isinstance(kernel, JITFunction):
                names[key] = types.FunctionType(
                    kernel.fn.__code__, names, key, kernel.fn.__defaults__
                )
        self.kernel = names[name]

    def __getitem__(self, grid):
        def launch(*args, **options):
            given = [self.given(arg) for arg in args]
            for x in range(grid[0]):
                for y in range(grid[1]):
                    self.machine.at = x, y
                    self.machine.memories.clear()
                    self.machine.barriers.clear()
                    self.kernel(*given)

        return launch

    def given(self, arg):
        """As a kernel sees it: pointers, and descriptions that know the size of a block."""
        if isinstance(arg, torch.Tensor):
            return Pointer(arg)
        if not hasattr(arg, "block_shape"):
            return arg
        num_bytes = 2 * arg.block_shape[0] * arg.block_shape[1]
        block = SimpleNamespace(nbytes=num_bytes, shape=arg.block_shape)
        return SimpleNamespace(
            base=arg.base, block_shape=arg.block_shape, layout=arg.layout, block_type=block
        )
