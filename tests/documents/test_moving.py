"""docs/moving.md's statements about other attention functions are true."""

from __future__ import annotations

import math
from typing import Any

import pages
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.nn.attention.varlen import AuxRequest, varlen_attn

from selfattn_ext import MultiheadAttention, attention_with_kvcache, reference, scaled_dot_product_attention

BATCH, HEADS, WIDTH = 2, 4, 8
#: Fewer queries than keys, as many, and more.
LENGTHS = [(3, 7), (5, 5), (6, 4)]


def named(name: str) -> Any:
    """Returns a function of the page."""
    (block,) = [block for block in pages.blocks("docs/moving.md") if f"def {name}(" in block.code]
    return block.run()[name]


def tensors(length: int, source: int, kv_heads: int = HEADS) -> tuple[Tensor, Tensor, Tensor]:
    """Returns random query, key and value, each (B, H, T, D)."""
    shapes = [(HEADS, length), (kv_heads, source), (kv_heads, source)]
    query, key, value = (torch.randn(BATCH, heads, n, WIDTH) for heads, n in shapes)
    return query, key, value


def as_flash_attention(
    q: Tensor, k: Tensor, v: Tensor, scale: float, softcap: float, slopes: Tensor | None, visible: Tensor
) -> Tensor:
    """Computes what FlashAttention's docstring says, for (B, T, H, D), in float64, with a bool mask."""
    query, key, value = (x.double().transpose(1, 2) for x in (q, k, v))
    options = {"scale": scale, "softcap": softcap, "alibi_slopes": slopes}
    offset = k.size(1) - q.size(1)
    return reference.attention(query, key, value, visible, query_offset=offset, **options).out.transpose(1, 2)


def lower_right(length: int, source: int, left: int, right: int) -> Tensor:
    """Query i sees keys i + S - L - left to i + S - L + right; a negative number is no bound."""
    i, j = torch.arange(length)[:, None] + source - length, torch.arange(source)
    return ((j >= i - left) | (left < 0)) & ((j <= i + right) | (right < 0))


def test_lower_right_is_as_flash_attention_draws_it() -> None:
    assert lower_right(2, 5, -1, 0).int().tolist() == [[1, 1, 1, 1, 0], [1, 1, 1, 1, 1]]
    assert lower_right(5, 2, -1, 0).int().tolist() == [[0, 0], [0, 0], [0, 0], [1, 0], [1, 1]]


#: Arguments of flash_attn_func, and how many keys to the left and right of its place a query sees.
OPTIONS: dict[str, tuple[dict[str, Any], int, int]] = {
    "plain": ({}, -1, -1),
    "causal": ({"causal": True}, -1, 0),
    "window": ({"window_size": (2, 1)}, 2, 1),
    "causal window": ({"causal": True, "window_size": (1, 3)}, 1, 0),
    "softcap": ({"softmax_scale": 0.7, "softcap": 1.5, "causal": True}, -1, 0),
    "alibi": ({"alibi_slopes": (0.5, 0.25, 0.125, 0.1)}, -1, -1),
}
OUR_NAMES = {"causal": "is_causal", "softmax_scale": "scale"}


def numbers_of(options: dict[str, Any]) -> tuple[tuple[float, float], Tensor | None]:
    """Returns scale and softcap, and the slopes."""
    slopes = torch.tensor(options["alibi_slopes"]) if "alibi_slopes" in options else None
    return (options.get("softmax_scale", WIDTH**-0.5), options.get("softcap", 0.0)), slopes


class TestFlashAttention:
    @pytest.mark.parametrize(("length", "source"), LENGTHS)
    @pytest.mark.parametrize(("options", "left", "right"), OPTIONS.values(), ids=OPTIONS)
    def test_its_arguments(
        self, length: int, source: int, options: dict[str, Any], left: int, right: int
    ) -> None:
        q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(length, source, kv_heads=2))
        numbers, slopes = numbers_of(options)
        visible = lower_right(length, source, left, right)
        expected = as_flash_attention(q, k, v, *numbers, slopes, visible)
        out = named("flash_attn_func")(q, k, v, **{**options, "alibi_slopes": slopes})
        torch.testing.assert_close(out, expected.float())

    @pytest.mark.parametrize(("options", "left", "right"), OPTIONS.values(), ids=OPTIONS)
    @pytest.mark.parametrize("chosen", [False, True], ids=["cache", "cache_batch_idx"])
    def test_kvcache(self, options: dict[str, Any], left: int, right: int, chosen: bool) -> None:
        lengths, index = [4, 0], torch.tensor([2, 0] if chosen else [0, 1])
        q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(3, 3, kv_heads=2))
        caches = [torch.randn(3, 9, 2, WIDTH) for _ in range(2)]
        before = [cache.clone() for cache in caches]
        numbers, slopes = numbers_of(options)
        ours = {OUR_NAMES.get(name, name): value for name, value in options.items()}
        # Each page is a whole row of the cache.
        given = (caches, index[:, None].int()) if chosen else ([cache[:2] for cache in caches], None)
        out = attention_with_kvcache(
            *(q, *given[0], k, v, torch.tensor(lengths), given[1]),
            **{**ours, "alibi_slopes": slopes},
            enable_gqa=True,
            layout="blhd",
        )
        for n, (row, length) in enumerate(zip(index, lengths, strict=True)):
            rows = [torch.cat([b[row, :length], new[n]]) for b, new in zip(before, (k, v), strict=True)]
            for cache, filled, old in zip(caches, rows, before, strict=True):
                assert torch.equal(cache[row], torch.cat([filled, old[row, length + 3 :]]))
            expected = as_flash_attention(
                *(q[n : n + 1], *(filled[None] for filled in rows)),
                *numbers,
                slopes,
                lower_right(3, length + 3, left, right),
            )
            torch.testing.assert_close(out[n : n + 1], expected.float())

    def test_kvcache_of_the_same_signature(self) -> None:
        function = named("flash_attn_with_kvcache")
        q, k, v = (x.transpose(1, 2).contiguous() for x in tensors(5, 5, kv_heads=2))
        cache = torch.zeros(2, BATCH, 8, 2, WIDTH)
        steps = [function(q[:, :3], *cache, k[:, :3], v[:, :3], cache_seqlens=0, causal=True)]
        for n in (3, 4):
            one = slice(n, n + 1)
            steps.append(function(q[:, one], *cache, k[:, one], v[:, one], cache_seqlens=n, causal=True))
        expected = as_flash_attention(q, k, v, WIDTH**-0.5, 0.0, None, lower_right(5, 5, -1, 0))
        torch.testing.assert_close(torch.cat(steps, dim=1), expected.float())

    @pytest.mark.parametrize("interleaved", [True, False])
    def test_rotary_tables(self, interleaved: bool) -> None:
        """Row cache_seqlens + i of the tables rotates token i; both tables have the dtype of q."""
        cos, sin = torch.randn(2, 20, 3).bfloat16().unbind(0)
        x, lengths = torch.randn(BATCH, 5, HEADS, WIDTH).bfloat16(), torch.tensor([7, 0])
        result = named("rotated")(x, cos, sin, lengths, interleaved)
        for n in range(BATCH):
            for i in range(5):
                turned = x[n, i, :, :6].double()
                first, second = (turned[:, 0::2], turned[:, 1::2]) if interleaved else turned.split(3, dim=-1)
                c, s = (table[int(lengths[n]) + i].double() for table in (cos, sin))
                parts = (first * c - second * s, first * s + second * c)
                exact = torch.stack(parts, -1).flatten(1) if interleaved else torch.cat(parts, -1)
                torch.testing.assert_close(result[n, i, :, :6].double(), exact, rtol=2**-8, atol=1e-6)
        assert torch.equal(result[..., 6:], x[..., 6:])

    def test_lse_of_varlen_attn_has_heads_first(self) -> None:
        """torch's documentation says otherwise."""
        with FakeTensorMode():
            offsets = torch.empty(3, dtype=torch.int32)
            x = torch.empty(5, HEADS, WIDTH)
            _, lse = varlen_attn(x, x, x, offsets, offsets, 3, 3, return_aux=AuxRequest(lse=True))
        assert lse.shape == (HEADS, 5)


class TestFlashAttention4:
    """As its sources say, None is no bound, and a sink is one more column of the softmax."""

    @pytest.mark.parametrize(("length", "source"), LENGTHS)
    @pytest.mark.parametrize(
        ("options", "left", "right"),
        [
            ({}, -1, -1),
            ({"causal": True, "softmax_scale": 0.7}, -1, 0),
            ({"window_size": (2, None)}, 2, -1),
            ({"window_size": (None, 1)}, -1, 1),
            ({"causal": True, "window_size": (1, None)}, 1, 0),
        ],
        ids=["plain", "causal", "left", "right", "causal window"],
    )
    def test_its_arguments(
        self, length: int, source: int, options: dict[str, Any], left: int, right: int
    ) -> None:
        q, k, v = (x.transpose(1, 2) for x in tensors(length, source, kv_heads=2))
        sinks = torch.randn(HEADS)
        out, lse = named("flash_attn_4_func")(q, k, v, learnable_sink=sinks, **options)
        key, value = (x.transpose(1, 2).double().repeat_interleave(HEADS // 2, 1) for x in (k, v))
        scores = q.transpose(1, 2).double() @ key.mT * options.get("softmax_scale", WIDTH**-0.5)
        scores = scores.masked_fill(~lower_right(length, source, left, right), -math.inf)
        column = sinks.double().view(HEADS, 1, 1).expand(BATCH, HEADS, length, 1)
        extended = torch.cat([scores, column], -1)
        expected = extended.softmax(-1)[..., :-1] @ value
        torch.testing.assert_close(out, expected.transpose(1, 2).float())
        torch.testing.assert_close(lse, extended.logsumexp(-1).float())


class TestNatten:
    """The windows of na1d, counted as its reference kernel does for each group of a dilation."""

    @staticmethod
    def visible(length: int, size: int, stride: int, dilation: int, causal: bool) -> Tensor:
        seen = torch.zeros(length, length, dtype=torch.bool)
        left, right = size // 2, size // 2 + size % 2 - 1
        for group in range(dilation):
            members = torch.arange(group, length, dilation)
            n = len(members)
            for place in range(n):
                leader = min(place // stride * stride + (stride - 1 if causal else stride // 2), n - 1)
                if causal:
                    start, end = max(leader - left - right, 0), place + 1
                else:
                    start = max(leader - left, 0)
                    if leader + right >= n:
                        start += n - right - leader - 1
                    end = start + size
                seen[members[place], members[start:end]] = True
        return seen

    @pytest.mark.parametrize("causal", [False, True])
    @pytest.mark.parametrize(
        ("length", "size", "stride", "dilation"),
        [(7, 3, 1, 1), (13, 4, 1, 1), (13, 5, 2, 1), (14, 4, 3, 1), (17, 3, 1, 4), (19, 4, 2, 3)],
    )
    def test_windows(self, length: int, size: int, stride: int, dilation: int, causal: bool) -> None:
        q, k, v = tensors(length, length, kv_heads=2)
        seen = self.visible(length, size, stride, dilation, causal)
        if not causal:
            assert (seen.sum(-1) == size).all()
        expected = reference.attention(q, k, v, seen).out
        result = named("na1d")(*(x.transpose(1, 2) for x in (q, k, v)), size, stride, dilation, causal)
        torch.testing.assert_close(result.transpose(1, 2), expected)
        if causal and stride == dilation == 1:
            ours = scaled_dot_product_attention(
                q, k, v, is_causal=True, window_size=(size - 1, 0), enable_gqa=True
            )
            torch.testing.assert_close(ours, expected)


class TestXformers:
    """xFormers' biases as it documents them: as tensors that are added to the scores."""

    @pytest.mark.parametrize(("length", "source"), LENGTHS)
    @pytest.mark.parametrize(
        ("options", "left", "right", "moved"),
        [
            ({"is_causal": True}, -1, 0, False),
            ({"is_causal": True}, -1, 0, True),
            ({"is_causal": True, "window_size": (2, -1)}, 2, 0, True),
            ({"window_size": (1, 2)}, 1, 2, True),
        ],
        ids=["LowerTriangular", "FromBottomRight", "FromBottomRightLocal", "LocalFromBottomRight"],
    )
    def test_biases(
        self, length: int, source: int, options: dict[str, Any], left: int, right: int, moved: bool
    ) -> None:
        query, key, value = tensors(length, source)
        # The upper left corner gives the same mask as the lower right one of a square.
        visible = lower_right(length, source if moved else length, left, right)
        full = torch.zeros(length, source, dtype=torch.bool)
        full[:, : visible.size(1)] = visible[:, :source]
        offset = source - length if moved else 0
        out = scaled_dot_product_attention(query, key, value, query_offset=offset, **options)
        torch.testing.assert_close(out, reference.attention(query, key, value, full).out)

    def test_local_counts_its_own_place(self) -> None:
        x = torch.randn(BATCH, 6, HEADS, WIDTH)
        heads = x.transpose(1, 2)
        expected = reference.attention(heads, heads, heads, lower_right(6, 6, 2, 0)).out
        torch.testing.assert_close(named("local")(x, x, x, 3), expected.transpose(1, 2))

    def test_three_dimensions_and_groups(self) -> None:
        query, key, value = (x[:, 0] for x in tensors(5, 7))  # (B, T, D)
        torch.testing.assert_close(
            scaled_dot_product_attention(query, key, value), F.scaled_dot_product_attention(query, key, value)
        )
        grouped, key, value = torch.randn(BATCH, 5, 2, 2, WIDTH), *tensors(5, 7, kv_heads=2)[1:]
        heads = grouped.flatten(2, 3).transpose(1, 2)  # (B, T, G, H, D) to (B, G * H, T, D)
        out = scaled_dot_product_attention(heads, key, value, enable_gqa=True)
        for group in range(2):
            expected = F.scaled_dot_product_attention(
                grouped[:, :, group].transpose(1, 2), key[:, group, None], value[:, group, None]
            )
            torch.testing.assert_close(out[:, 2 * group : 2 * group + 2], expected)


class TestTorchFunction:
    @pytest.mark.parametrize(("length", "source"), LENGTHS)
    def test_causal_is_aligned_as_there(self, length: int, source: int) -> None:
        query, key, value = tensors(length, source)
        torch.testing.assert_close(
            scaled_dot_product_attention(query, key, value, is_causal=True),
            F.scaled_dot_product_attention(query, key, value, is_causal=True),
        )

    def test_a_query_that_sees_nothing(self) -> None:
        query, key, value = tensors(5, 7)
        mask = torch.ones(5, 7, dtype=torch.bool)
        mask[2] = False
        theirs = F.scaled_dot_product_attention(query, key, value, mask)
        assert (theirs[:, :, 2] == 0).all()
        torch.testing.assert_close(scaled_dot_product_attention(query, key, value, mask), theirs)

    def test_what_only_this_one_takes(self) -> None:
        query, key, value = tensors(5, 5)
        mask = torch.randn(5, 5, dtype=torch.float64)
        with pytest.raises(RuntimeError, match="attn_mask dtype"):
            F.scaled_dot_product_attention(query, key, value, mask)
        scaled_dot_product_attention(query, key, value, mask)
        learning = mask.float().requires_grad_()
        with pytest.raises(RuntimeError, match="is_causal"):
            F.scaled_dot_product_attention(query, key, value, learning, is_causal=True)
        scaled_dot_product_attention(query, key, value, learning, is_causal=True)

    def test_hidden_nan(self) -> None:
        query, key, value = tensors(5, 5)
        value[:, :, 4] = math.nan
        seen = torch.tensor([True] * 4 + [False])
        assert F.scaled_dot_product_attention(query, key, value, seen.expand(5, 5)).isnan().any()
        assert not scaled_dot_product_attention(query, key, value, seen.expand(5, 5)).isnan().any()


class TestTorchLayer:
    LENGTH = 6

    @pytest.fixture
    def layers(self) -> tuple[torch.nn.MultiheadAttention, MultiheadAttention]:
        theirs = torch.nn.MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
        ours = MultiheadAttention(HEADS * WIDTH, HEADS, batch_first=True)
        ours.load_state_dict(theirs.state_dict())
        return theirs, ours

    def by_function(
        self, layer: torch.nn.MultiheadAttention, x: Tensor, mask: Tensor, **options: Any
    ) -> Tensor:
        """Computes the layer by hand: projections, the function, a projection."""
        projected = F.linear(x, layer.in_proj_weight, layer.in_proj_bias).chunk(3, dim=-1)
        q, k, v = (part.unflatten(-1, (HEADS, -1)).transpose(1, 2) for part in projected)
        out = scaled_dot_product_attention(q, k, v, mask)
        return layer.out_proj(out.transpose(1, 2).flatten(2))

    @pytest.mark.parametrize("kind", ["padding", "bool", "numbers", "per head"])
    def test_masks(self, layers: tuple[torch.nn.MultiheadAttention, MultiheadAttention], kind: str) -> None:
        x = torch.randn(BATCH, self.LENGTH, HEADS * WIDTH)
        hidden = ~lower_right(self.LENGTH, self.LENGTH, 2, 1)
        mask, seen, name = hidden, ~hidden, "attn_mask"
        if kind == "padding":
            mask = torch.arange(self.LENGTH) >= torch.tensor([[self.LENGTH], [4]])
            seen, name = ~mask[:, None, None, :], "key_padding_mask"
        if kind == "numbers":
            mask = seen = torch.randn(self.LENGTH, self.LENGTH)
        if kind == "per head":
            mask = torch.randn(BATCH * HEADS, self.LENGTH, self.LENGTH)
            seen = mask.unflatten(0, (BATCH, HEADS))
        theirs, ours = (layer(x, x, x, **{name: mask})[0] for layer in layers)
        torch.testing.assert_close(ours, theirs)
        torch.testing.assert_close(self.by_function(layers[0], x, seen), theirs)

    def test_causal(self, layers: tuple[torch.nn.MultiheadAttention, MultiheadAttention]) -> None:
        x = torch.randn(BATCH, self.LENGTH, HEADS * WIDTH)
        hidden = torch.nn.Transformer.generate_square_subsequent_mask(self.LENGTH)
        theirs = layers[0](x, x, x, attn_mask=hidden, is_causal=True, need_weights=False)[0]
        with pytest.raises(RuntimeError, match="attn_mask"):
            layers[0](x, x, x, is_causal=True, need_weights=False)
        torch.testing.assert_close(layers[1](x, x, x, is_causal=True, need_weights=False)[0], theirs)

    def test_a_query_that_sees_nothing(
        self, layers: tuple[torch.nn.MultiheadAttention, MultiheadAttention]
    ) -> None:
        x = torch.randn(BATCH, self.LENGTH, HEADS * WIDTH)
        hidden = torch.zeros(self.LENGTH, self.LENGTH, dtype=torch.bool)
        hidden[2] = True
        theirs, ours = (layer(x, x, x, attn_mask=hidden)[0] for layer in layers)
        assert theirs[:, 2].isnan().all()
        torch.testing.assert_close(ours[:, 2], layers[1].out_proj.bias.expand(BATCH, -1))
