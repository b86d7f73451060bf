"""Keys of full blocks of tokens, by which requests find cached prefixes of other requests.

A key is a hash of the block's tokens and of the key before it, so it stands for all tokens so far.
The first key depends on the tenant and the request's salt, so that nobody finds, or can time, what
others have cached. The hash is keyed with random bytes drawn at the start, so that no client can
search for tokens that collide.
"""

from __future__ import annotations

import array
import os
from collections.abc import Iterable, Sequence
from hashlib import blake2b

SECRET_BYTES = 32
BYTES = 16  # per key: two of 2^40 blocks collide with a probability of 2^-49


class KeyChain:
    """The keys of one continuation's blocks.

    Args:
        secret: Key of the hash.
        root: What the first block's key depends on.
        block_size: Tokens of a block.
        tokens: Tokens of the prompt.
        known: Keys of its first blocks, which are not computed again.

    Attributes:
        keys: Keys of the full blocks so far.
    """

    def __init__(
        self,
        secret: bytes,
        root: bytes,
        block_size: int,
        tokens: Sequence[int],
        known: Sequence[bytes] = (),
    ) -> None:
        self._secret, self._block_size = secret, block_size
        self._last = known[-1] if known else root
        self.keys = list(known)
        self._rest = array.array("i")
        self._add(array.array("i", tokens[len(known) * block_size :]))

    def copy(self) -> KeyChain:
        """An independent copy."""
        made = KeyChain(self._secret, self._last, self._block_size, (), self.keys)
        made._rest = self._rest[:]
        return made

    def answer(self, prompt_len: int) -> tuple[bytes, tuple[int, ...]]:
        """Where the output ends so far, as `program_table.Answer`; b"" before it has a token, or a
        block is full. prompt_len: tokens of the prompt."""
        full = len(self.keys) * self._block_size
        if not full or full + len(self._rest) <= prompt_len:
            return b"", ()
        return self._last, () if full > prompt_len else tuple(self._rest)

    def extend(self, tokens: Iterable[int]) -> list[bytes]:
        """Appends tokens. Returns the keys of the blocks that they complete."""
        before = len(self.keys)
        self._rest.extend(tokens)
        if len(self._rest) >= self._block_size:
            self._add(self._rest)
        return self.keys[before:]

    def _add(self, tokens: array.array[int]) -> None:
        view, last, secret = memoryview(tokens).cast("B"), self._last, self._secret
        width = self._block_size * tokens.itemsize
        full = len(view) // width * width
        for begin in range(0, full, width):
            made = blake2b(last, digest_size=BYTES, key=secret)
            made.update(view[begin : begin + width])
            last = made.digest()
            self.keys.append(last)
        self._last, self._rest = last, tokens[full // tokens.itemsize :]


class BlockKeys:
    """Makes the keys of an engine's requests.

    Args:
        block_size: Tokens of a block.
        shared: Whether tenants share cached prefixes.
        secret: Key of the hash, 16 to 64 bytes, if several engines must make the same keys; None
        draws a random one.
    """

    def __init__(
        self, block_size: int, *, shared: bool = False, secret: bytes | None = None
    ) -> None:
        self._block_size, self._shared = block_size, shared
        self._secret = os.urandom(SECRET_BYTES) if secret is None else secret

    def of(
        self,
        tokens: Sequence[int],
        tenant: str = "",
        salt: str = "",
        known: Sequence[bytes] = (),
        adapter: bytes = b"",
        apart: str = "",
    ) -> KeyChain:
        """The keys of a prompt's blocks. Any thread may ask.

        Args:
            tokens: Tokens of the prompt.
            tenant: Only its requests find the prefix.
            salt: Only requests with this salt find it.
            known: Keys of its first blocks.
            adapter: Digest of the adapter that computes it; empty for the base model.
            apart: How it is computed, if not as usual; only requests computed in the same way find
            it.
        """
        parts = ("adapter", adapter.hex()) if adapter else ()
        root = self._root(tenant, salt, *parts, *((apart, "") if apart else ()))
        size = self._block_size
        if (adapter or apart) and known and len(tokens) >= size:
            # They may belong to others, or the adapter may have been reloaded from other files.
            first = KeyChain(self._secret, root, size, tokens[:size]).keys
            known = known if first == list(known[:1]) else ()
        return KeyChain(self._secret, root, size, tokens, known)

    def hint(self, text: str, tenant: str = "", salt: str = "") -> bytes:
        """A key like these for a tenant's hint that requests begin alike; other tenants get other
        keys. Empty for an empty text. No block has such a key."""
        return self._root(tenant, salt, text) if text else b""

    def _root(self, tenant: str, *parts: str) -> bytes:
        root = blake2b(digest_size=BYTES, key=self._secret)
        for part in ("" if self._shared else tenant, *parts):
            text = part.encode("utf-8", "surrogatepass")
            root.update(len(text).to_bytes(8, "little") + text)
        return root.digest()
