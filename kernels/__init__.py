"""Every layer of GPT-2 as a ladder of numbered kernels. See README.md, and kernels/layernorm for the model of a layer."""
