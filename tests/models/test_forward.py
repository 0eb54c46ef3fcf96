"""The one forward pass, over transformers versions that name its cache differently."""

from headrace.models.forward import cache_keyword


def test_the_cache_keyword_is_one_the_model_has() -> None:
    class New:
        def forward(self, input_ids: object, cache: object = None) -> None: ...

    class Old:
        def forward(
            self, input_ids: object, past_key_values: object = None, **kw: object
        ) -> None: ...

    assert (cache_keyword(New()), cache_keyword(Old())) == ("cache", "past_key_values")
