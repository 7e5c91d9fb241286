"""Every name of SGLang that we call, override or read: one row each. What we hook stands in the modules' `HOOKS`."""

from __future__ import annotations

from sglang_dspark.contract.names import SglangName, attributes, calls, fields, overrides, used_by

TABLE: tuple[SglangName, ...] = (
    *used_by(
        "settings/flags.py",
        fields("sglang.srt.server_args:ServerArgs", "speculative_algorithm speculative_draft_model_path"),
    ),
    *used_by(
        "contract/hooks.py",
        calls("sglang.srt.plugins.hook_registry", "HookRegistry.register(target, hook, hook_type)"),
        attributes("sglang.srt.plugins.hook_registry:HookType", "BEFORE AFTER AROUND REPLACE"),
    ),
    *used_by(
        "accelerator/",
        calls("sglang.srt.runtime_context", "get_platform()", "attention_backends()"),
        calls("sglang.srt.utils.common", "get_device_memory_capacity(device)"),
        fields("sglang.srt.server_args:ServerArgs", "mem_fraction_static max_running_requests"),
        overrides(
            "sglang.srt.layers.attention.triton_backend",
            "TritonAttnBackend._update_target_verify_buffers(plan, bs, seq_lens, spec_info, req_pool_indices)",
            "TritonAttnBackend.init_forward_metadata(forward_batch)",
        ),
        fields("sglang.srt.layers.attention.triton_backend:TritonAttnBackend", "target_verify_num_tokens_per_req"),
        attributes("sglang.srt.speculative.dflash_utils", "_DFLASH_VERIFY_SKIP_CUSTOM_MASK_BACKENDS"),
        calls(
            "sglang.srt.speculative.ragged_verify",
            "RaggedVerifyLayout.padded_to_bucket(padded_bs, cap)",
            "resolve_ragged_verify_layout(forward_batch)",
        ),
    ),
    *used_by(
        "commands/serve.py",
        calls("sglang.srt.plugins", "load_plugins()"),
        calls("sglang.srt.server_args", "prepare_server_args(argv)", "ServerArgs.url()"),
        calls(
            "sglang.srt.utils.server_args_config_parser",
            "ConfigArgumentMerger(parser)",
            "ConfigArgumentMerger.merge_config_with_args(cli_args)",
        ),
    ),
    *used_by(
        "commands/launch.py",
        calls(
            "sglang.srt.entrypoints.http_server",
            "launch_server(server_args, init_tokenizer_manager_func, run_scheduler_process_func, "
            "run_detokenizer_process_func, launch_callback)",
        ),
        calls("sglang.launch_server", "run_server(server_args)"),
        calls("sglang.srt.entrypoints.engine", "init_tokenizer_manager(server_args, port_args)"),
        attributes("sglang.srt.managers.scheduler", "run_scheduler_process"),
        attributes("sglang.srt.managers.detokenizer_manager", "run_detokenizer_process"),
        fields("sglang.srt.managers.tokenizer_manager:TokenizerManager", "signal_handler_class"),
        overrides(
            "sglang.srt.managers.tokenizer_manager", "SignalHandler.running_phase_sigquit_handler(signum, frame)"
        ),
        calls("sglang.srt.managers.tokenizer_manager", "TokenizerManager.dump_requests_before_crash()"),
    ),
    *used_by(
        "plugin.py",
        calls("sglang.srt.speculative.spec_info", "SpeculativeAlgorithm.register(name, supports_overlap, spec_class)"),
        fields("sglang.srt.sampling.sampling_params:SamplingParams", "custom_params sampling_seed"),
    ),
    *used_by(
        "engine/algorithm.py",
        overrides(
            "sglang.srt.speculative.spec_registry",
            "CustomSpecAlgo.handle_server_args(server_args)",
            "CustomSpecAlgo.get_num_tokens_per_req_for_target_verify(num_draft_tokens, is_draft_worker)",
        ),
        attributes("sglang.srt.managers.overlap_utils", "FutureMap"),
        fields(
            "sglang.srt.server_args:ServerArgs",
            "speculative_num_draft_tokens speculative_num_steps speculative_eagle_topk min_free_slots_delay",
        ),
    ),
    *used_by(
        "step/worker.py",
        overrides(
            "sglang.srt.speculative.base_spec_worker",
            "BaseSpecWorker.init_attention_backends()",
            "BaseSpecWorker.init_cuda_graphs()",
            "BaseSpecWorker.weight_update_runners()",
        ),
        attributes("sglang.srt.speculative.base_spec_worker:BaseSpecWorker", "spec_v2_attn_backends"),
        calls(
            "sglang.srt.managers.tp_worker",
            "TpModelWorker.forward_batch_generation(batch, forward_batch, is_verify, capture_hidden_mode)",
        ),
        calls(
            "sglang.srt.managers.utils",
            "GenerationBatchResult(logits_output, next_token_ids, accept_lens, block_accept_lens, cap_lens, "
            "can_run_cuda_graph, next_draft_input, speculative_num_draft_tokens, new_seq_lens)",
        ),
        calls("sglang.srt.speculative.draft_worker_common", "make_draft_input_v2(bonus_tokens, new_seq_lens)"),
        calls(
            "sglang.srt.layers.logprob_processor", "compute_spec_logprobs(batch, logits_output, predict, chain_stride)"
        ),
    ),
    *used_by(
        "step/types.py",
        calls(
            "sglang.srt.speculative.dflash_info",
            "DFlashVerifyInput(draft_token, positions, draft_token_num, capture_hidden_mode, kv_loc_plan, kv_loc_cols)",
        ),
        calls(
            "sglang.srt.mem_cache.kv_index_translator",
            "KVIndexTranslator.plan(req_pool_indices, seq_lens, seq_lens_cpu, write_virtual, read_extent)",
            "KVIndexTranslator.own_plan(forward_batch)",
        ),
        fields("sglang.srt.mem_cache.kv_index_translator:KVIndexTranslator", "req_to_token"),
        calls("sglang.srt.mem_cache.kv_loc_plan", "KVLocPlan.write_ids(reader)", "KVLocPlan.bind(batch, reader, cols)"),
        fields("sglang.srt.managers.schedule_batch:Req", "output_ids sampling_params custom_logit_processor"),
    ),
    *used_by(
        "step/drafter.py, step/verifier.py",
        calls(
            "sglang.srt.speculative.draft_worker_common",
            "build_draft_tp_worker(server_args, gpu_id, nccl_port, target_model_config, algo_label, random_seed)",
        ),
        calls("sglang.srt.models.registry", "ModelRegistry.register(package_name, overwrite)"),
        calls(
            "sglang.srt.model_executor.forward_batch_info",
            "ForwardBatch.init_new(batch, model_runner, capture_hidden_mode, return_hidden_states_before_norm, "
            "kv_loc_plan, write_cols)",
        ),
        attributes("sglang.srt.model_executor.forward_batch_info:ForwardMode", "TARGET_VERIFY"),
        attributes("sglang.srt.model_executor.forward_batch_info:CaptureHiddenMode", "FULL"),
        calls("sglang.srt.model_executor.model_runner", "ModelRunner.forward(forward_batch)"),
        calls(
            "sglang.srt.speculative.ragged_verify", "RaggedVerifyLayout.from_verify_lens(verify_lens_cpu, device, grid)"
        ),
        attributes("sglang.srt.environ:envs", "SGLANG_RAGGED_VERIFY_MODE"),
        calls(
            "sglang.srt.model_executor.runner.decode_cuda_graph_runner",
            "DecodeCudaGraphRunner._build_ragged_verify_token_buckets()",
        ),
        fields("sglang.srt.server_args:ServerArgs", "enable_lora enable_two_batch_overlap disable_cuda_graph_padding"),
        attributes("sglang.srt.layers.attention.base_attn_backend:AttentionBackend", "supports_ragged_verify_graph"),
    ),
    *used_by(
        "step/adjust.py",
        calls("sglang.srt.layers.sampler", "apply_custom_logit_processor(logits, sampling_batch_info)"),
        calls(
            "sglang.srt.constrained.base_grammar_backend",
            "BaseGrammarObject.allocate_vocab_mask(vocab_size, batch_size, device)",
            "BaseGrammarObject.fill_vocab_mask(vocab_mask, idx)",
            "BaseGrammarObject.rollback(k)",
        ),
    ),
    *used_by(
        "models/block.py, models/draft.py",
        calls(
            "sglang.srt.layers.radix_attention",
            "RadixAttention(num_heads, head_dim, scaling, num_kv_heads, layer_id, attn_type)",
        ),
        attributes("sglang.srt.layers.radix_attention:AttentionType", "ENCODER_ONLY"),
        calls(
            "sglang.srt.layers.linear",
            "QKVParallelLinear(hidden_size, head_size, total_num_heads, total_num_kv_heads, bias)",
            "MergedColumnParallelLinear(input_size, output_sizes, bias)",
            "RowParallelLinear(input_size, output_size, bias)",
        ),
        calls("sglang.srt.layers.layernorm", "RMSNorm(hidden_size, eps)"),
        calls(
            "sglang.srt.layers.rotary_embedding",
            "get_rope(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling)",
        ),
        calls("sglang.srt.layers.logits_processor", "LogitsProcessorOutput(next_token_logits, hidden_states)"),
        calls("sglang.srt.mem_cache.memory_pool", "KVWriteLoc(loc, physical)"),
    ),
    *used_by(
        "models/gemma4.py, models/families.py",
        calls("sglang.srt.layers.activation", "GeluAndMul(approximate)"),
        calls(
            "sglang.srt.layers.rotary_embedding",
            "get_rope(head_size, rotary_dim, max_position, base, is_neox_style, rope_scaling, partial_rotary_factor)",
        ),
        calls("sglang.srt.configs.hybrid_arch", "mambaish_config(model_config)"),
    ),
    *used_by(
        "step/ranks.py",
        calls("sglang.srt.runtime_context", "get_parallel()"),
        calls("sglang.srt.distributed.parallel_state", "GroupCoordinator.broadcast(input_, src)"),
        fields("sglang.srt.distributed.parallel_state:GroupCoordinator", "cpu_group"),
    ),
    *used_by(
        "serving/control.py, serving/routes.py",
        calls("sglang.srt.managers.io_struct", "SetInternalStateReqOutput(updated)"),
        calls("sglang.srt.utils.auth", "auth_level(level)"),
    ),
    *used_by(
        "serving/answers.py, repairs/tool_streams.py",
        calls("sglang.srt.entrypoints.openai.protocol", "CompletionTokensDetails(reasoning_tokens)"),
        fields("sglang.srt.entrypoints.openai.protocol:UsageInfo", "completion_tokens_details reasoning_tokens"),
        fields("sglang.srt.entrypoints.openai.protocol:ChatCompletionResponseChoice", "finish_reason matched_stop"),
        fields("sglang.srt.entrypoints.anthropic.protocol:AnthropicMessagesResponse", "stop_reason stop_sequence"),
        fields("sglang.srt.entrypoints.anthropic.serving:AnthropicServing", "openai_serving_chat"),
        attributes("sglang.srt.entrypoints.openai.serving_chat:OpenAIServingChat", "_generate_chat_stream"),
        calls("sglang.srt.runtime_context", "get_serving()"),
        calls("sglang.srt.function_call.core_types", "StreamingParseResult(normal_text, calls)"),
        fields(
            "sglang.srt.function_call.base_format_detector:BaseFormatDetector",
            "_buffer current_tool_id current_tool_name_sent bot_token eot_token",
        ),
    ),
    *used_by(
        "cpu/",
        attributes("sglang.srt.arg_groups.choices", "ATTENTION_BACKEND_CHOICES DRAFT_ATTENTION_BACKEND_CHOICES"),
        calls("sglang.srt.layers.attention.attention_registry", "register_attention_backend(name)"),
        overrides(
            "sglang.srt.platforms.interface",
            "SRTPlatform.get_kv_pool_cls(kind)",
            "SRTPlatform.apply_server_args_defaults(server_args)",
            "SRTPlatform.supports_speculative_algorithm(algorithm)",
        ),
        attributes("sglang.srt.mem_cache.memory_pool", "MHATokenToKVPool"),
        overrides(
            "sglang.srt.layers.attention.base_attn_backend", "AttentionBackend.init_forward_metadata(forward_batch)"
        ),
    ),
    *used_by(
        "cpu/processes/cores.py",
        overrides("sglang.srt.distributed.bootstrap", "_bind_threads_if_cpu(device)"),
        attributes("sglang.srt.distributed.bootstrap", "_init_cpu_threads_env"),
        overrides("sglang.srt.distributed.parallel_state", "is_shm_available(dtype, world_size, local_size)"),
    ),
    *used_by(
        "cpu/attention/layers.py",
        calls("sglang.kernels.fused_op", "BaseFusedOp.register_oot_forward(op_cls, fn, platform_key)"),
        overrides(
            "sglang.srt.layers.layernorm", "RMSNorm.forward_native(x, residual, post_residual_addition, quant_linear)"
        ),
        fields(
            "sglang.srt.layers.layernorm:RMSNorm",
            "variance_epsilon cast_x_before_out_mul fp32_residual variance_size_override override_orig_dtype",
        ),
        overrides(
            "sglang.srt.layers.rotary_embedding.base",
            "RotaryEmbedding.forward_native(positions, query, key, offsets, fused_set_kv_buffer_arg)",
        ),
        fields("sglang.srt.layers.rotary_embedding.base:RotaryEmbedding", "is_neox_style head_size"),
        attributes("sglang.srt.layers.rotary_embedding.rope_variant", "Llama3RotaryEmbedding"),
    ),
)
