# Kernel strings: every one names a kernel or says, under its place, why not.

import pytest
from hypothesis import given
from hypothesis import strategies as st

from servanda.contract import kernel_string as language
from servanda.contract.kernel_string import kernel_string, parse_kernel, shown
from servanda.contract.model import Kernel
from servanda.errors import ContractError

ENGINES = ["openai_http", "pack", "table", "transformers"]

texts = st.text(min_size=1, max_size=12).filter(lambda t: t.isprintable() or '"' in t)
kernels = st.builds(
    Kernel,
    engine=st.sampled_from(["table", "transformers", "pack"]),
    model=texts,
    title=st.one_of(st.just(""), texts),
    dtype=st.sampled_from(language.DTYPES),
    attention=st.sampled_from(["eager", "sdpa"]),
    quantization=st.one_of(st.none(), st.sampled_from(language.QUANTIZATIONS)),
    path=st.sampled_from([None, "prefill", "decode"]),
    batch_size=st.integers(1, 4096),
    weights_from=st.one_of(st.none(), texts),
    python=st.one_of(st.none(), texts),
    options=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(["block_size", "attention_backend"]),
            st.one_of(st.booleans(), st.integers(), st.floats(0, 9), texts),
            min_size=1,
        ),
    ),
    fault=st.one_of(
        st.none(),
        st.dictionaries(
            st.sampled_from(["scale", "top_p"]),
            st.one_of(st.just(True), st.floats(0, 9), texts, st.dictionaries(texts, st.integers())),
            min_size=1,
            max_size=1,
        ),
    ),
)


def parse(text):
    return parse_kernel(text, engines=ENGINES, name="B")


def test_the_example_of_the_help_text():
    text = "transformers:models/tiny-lm@bfloat16+int8_weight_only,attention=sdpa,batch_size=16"
    assert parse(text) == Kernel(
        engine="transformers",
        model="models/tiny-lm",
        dtype="bfloat16",
        attention="sdpa",
        quantization="int8_weight_only",
        batch_size=16,
    )
    assert kernel_string(parse(text)) == text


def test_a_table_a_pack_and_a_fault():
    assert parse("table:p.json") == Kernel(engine="table", model="p.json")
    assert parse("runs/x.pack") == Kernel(engine="pack", model="runs/x.pack")
    assert kernel_string(parse("runs/x.pack")) == "runs/x.pack"
    assert parse("table:p.json,fault=top_p:0.9").fault == {"top_p": 0.9}
    assert parse("table:p.json,fault=wrong_ids").fault == {"wrong_ids": True}
    options = parse("transformers:m,option.block_size=32,option.backend=FLASH").options
    assert options == {"block_size": 32, "backend": "FLASH"}
    assert parse('table:"a,b@c.json"').model == "a,b@c.json"


@given(kernels)
def test_a_kernel_comes_back_from_its_string(kernel):
    assert parse(kernel_string(kernel)) == kernel


@pytest.mark.parametrize(
    ("text", "message"),
    [
        (
            "transformers:m@bf16",
            """\
B:1:16: no dtype is named 'bf16'
    1 | transformers:m@bf16
                       ^
  hint: did you mean 'bfloat16'?""",
        ),
        (
            "transformers:m@bfloat16+int8",
            """\
B:1:25: no quantization is named 'int8'
    1 | transformers:m@bfloat16+int8
                                ^
  hint: which one: int8_weight_only or int8_dynamic? They are different kernels""",
        ),
        (
            "http://localhost:8000/v1?key=a",
            """\
B:1:25: this is not the address of a server
    1 | http://localhost:8000/v1?key=a
                                ^
  hint: write http://HOST:PORT, and options after a comma""",
        ),
        (
            "models/tiny-lm",
            """\
B:1:15: a kernel is ENGINE:MODEL, and there is no colon
    1 | models/tiny-lm
                      ^
  hint: did you mean 'transformers:models/tiny-lm'?""",
        ),
        (
            "transfomers:m",
            """\
B:1:1: no engine is named 'transfomers'
    1 | transfomers:m
        ^
  hint: did you mean 'transformers'?""",
        ),
        (
            "localhost:8000,served=m",
            """\
B:1:1: no engine is named 'localhost'
    1 | localhost:8000,served=m
        ^
  hint: did you mean 'http://localhost:8000,served=m'?""",
        ),
        (
            "http://h:1,python=.venvs/vllm",
            """\
B:1:12: a url has no key 'python'
    1 | http://h:1,python=.venvs/vllm
                   ^
  hint: a server runs as it was started: remove it; `served` names one of its models""",
        ),
        (
            "table:p.json,attn=sdpa",
            """\
B:1:14: a kernel string has no key 'attn'
    1 | table:p.json,attn=sdpa
                     ^
  hint: did you mean 'attention'?""",
        ),
    ],
)
def test_what_is_wrong_is_said_under_its_place(text, message):
    with pytest.raises(ContractError) as caught:
        parse(text)
    assert str(caught.value) == message and caught.value.exit_code == 2


@pytest.mark.parametrize(
    ("text", "column", "part"),
    [
        (f"oci://host/base@sha256:{'0f' * 32}", 1, "an address in a registry names no kernel"),
        (f"https://host/base@sha256:{'0f' * 32}", 1, "an address in a registry names no kernel"),
        ("", 1, "an empty text names no kernel"),
        ("table:", 7, "the kernel names no model"),
        ("table:p,", 9, "no key ''"),
        ("table:p,path", 13, "path has no value"),
        ("table:p,path=both", 14, "path cannot be 'both'"),
        ("table:p,batch_size=many", 20, "batch_size is a whole number, not 'many'"),
        ("table:p,device=gpu", 16, "device: a device is cpu, cuda or cuda:N"),
        ("table:p,batch_size=0", 20, "batch_size: Input should be greater"),
        ("table:p,title=a,title=b", 17, "title is there twice"),
        ("transformers:m,option.a=1,option.a=2", 27, "option.a is there twice"),
        ('table:p,title="a', 15, "a quote inside a value, or one that is not closed"),
        ("table:p@w8a8", 9, "no dtype is named 'w8a8'"),
        ("http://", 1, "this is not the address of a server"),
        ("http://a b", 9, "this is not the address of a server"),
        ("http://a,dtype=float32", 10, "a url has no key 'dtype'"),
        ("http://a,dialect=openai", 18, "no dialect is named 'openai'"),
    ],
)
def test_every_mistake_has_its_column(text, column, part):
    with pytest.raises(ContractError) as caught:
        parse(text)
    problem = caught.value.problems[0]
    assert part in problem.message and problem.where.column == column and problem.hint


def test_a_server_is_named_by_its_url():
    text = "https://gpu-7:8000/v1,dialect=vllm,logprobs=processed,served=policy,batch_size=64"
    kernel = Kernel(
        engine="openai_http",
        url="https://gpu-7:8000/v1",
        dialect="vllm",
        logprobs="processed",
        served="policy",
        batch_size=64,
    )
    assert parse(text) == kernel and kernel_string(kernel) == text
    plain = Kernel(engine="openai_http", url="http://[::1]:80")
    assert parse("http://[::1]:80") == plain and kernel_string(plain) == "http://[::1]:80"


@given(
    st.builds(
        Kernel,
        engine=st.just("openai_http"),
        url=st.sampled_from(["http://a", "https://10.0.0.1:8000", "http://h:1/path/of/it"]),
        served=st.one_of(st.none(), texts),
        dialect=st.sampled_from([None, "vllm", "sglang", "llamacpp", "plain"]),
        logprobs=st.sampled_from([None, "raw", "processed"]),
        batch_size=st.integers(1, 4096),
        title=st.one_of(st.just(""), texts),
        weights_from=st.one_of(st.none(), texts),
    )
)
def test_every_server_has_a_string_that_gives_it_back(kernel):
    assert parse(kernel_string(kernel)) == kernel


def test_an_interpreter_is_a_key_of_what_runs_here():
    assert parse("table:p.json,python=.venvs/vllm").python == ".venvs/vllm"


def test_what_has_no_string_says_so():
    with pytest.raises(ContractError, match="no model"):
        kernel_string(Kernel(engine="table"))


def test_a_kernel_is_shown_by_its_title_or_its_pack():
    assert shown(parse("a/b.pack")) == "reference pack b.pack"
    assert shown(parse("table:p.json,title=mine")) == "mine"


def test_the_silence_of_a_server_is_a_key_of_urls():
    url = "http://127.0.0.1:8000,timeout_s=600.0"
    kernel = parse_kernel(url, engines=["openai_http"])

    assert kernel.timeout_s == 600 and kernel_string(kernel) == url
    with pytest.raises(ContractError, match="timeout_s is a number of seconds, not 'long'"):
        parse_kernel("http://127.0.0.1:8000,timeout_s=long", engines=["openai_http"])


def test_an_engine_of_another_package_may_need_no_model():
    """The engine of the how-to page is `clock`; an engine of ours is not complete without one."""
    engines = ["table", "clock"]
    kernel = parse_kernel("clock,batch_size=4", engines=engines)

    assert (kernel.engine, kernel.model, kernel.batch_size) == ("clock", None, 4)
    assert kernel_string(kernel) == "clock,batch_size=4"
    assert parse_kernel("clock:x", engines=engines).model == "x"
    with pytest.raises(ContractError, match="did you mean 'table:MODEL'"):
        parse_kernel("table", engines=engines)
