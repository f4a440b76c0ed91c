"""Serving: a plug-in that cuts image tokens inside vLLM, and `tokensieve serve`, which starts its OpenAI server.

    plugin          what vLLM calls in each of its processes (entry point `vllm.general_plugins`)
    families        the models of vLLM that can be cut, and where
    served_plan     the plan in a model's config: checked, or refused with the reason
    choosing        which tokens stay, remembered by the hash of the image
    positions       the positions of the tokens that stay
    engine_config   what vLLM's configuration needs for it
    vllm_models     vLLM's models with a plan; only these and engine_config import vLLM
    launch, model_folder    `tokensieve serve`

Loading the plug-in imports torch alone: torchvision and open_clip may be missing or broken beside vLLM.
"""
