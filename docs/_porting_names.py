"""The names of Bagua 0.9's `bagua.torch_api`, module by module: what a ported script may use.

A line is a function, a class with its constructor's parameters, or, with a leading dot, a member of
the class above it.
"""

from __future__ import annotations

NAMES = {
    "": (
        """
        init_process_group
        get_backend(model_name)
        ReduceOp
        send
        recv
        broadcast_coalesced
        broadcast_object
        broadcast
        reduce
        reduce_inplace
        allreduce_coalesced_inplace
        allreduce
        allreduce_inplace
        allgather
        allgather_inplace
        gather
        gather_inplace
        scatter
        scatter_inplace
        reduce_scatter
        reduce_scatter_inplace
        alltoall
        alltoall_inplace
        alltoall_v
        alltoall_v_inplace
        barrier
        BaguaModule
        BaguaTensor
        get_rank
        get_world_size
        get_local_rank
        get_local_size
        contrib
        communication
        algorithms
        data_parallel
        checkpoint
        moe
    """
    ),
    "env": (
        """
        get_world_size()
        get_rank()
        get_local_rank()
        get_local_size()
        get_node_rank()
        get_default_bucket_size()
        get_master_addr()
        find_free_network_port()
        get_bagua_service_port()
        is_report_metrics_switch_on()
        get_autotune_level()
        get_autotune_max_samples()
        get_autotune_sampling_confidence_time_s()
        get_autotune_warmup_time_s()
        get_is_output_autotune_log()
        get_autotune_server_wait_time()
    """
    ),
    "utils": (
        """
        flatten(tensors)
        unflatten(flat, tensors)
        apply_flattened_call(bucket, call, extra_args=None)
        apply_flattened_call_all(tensors, call)
        check_contiguous(tensors)
        get_flattened_tensor(tensors)
        LOGGER
        to_bagua_datatype(datatype)
        average_by_removing_extreme_values(raw_score_list)
        StatisticalAverage(last_update_time=time.time(), records=[], record_tail=(0.0, 0.0))
        .record_seconds()
        .total_recording_time()
        .get_records_mean(last_n_seconds)
        .record(val)
        .get(last_n_seconds)
    """
    ),
    "communication": (
        """
        class ReduceOp
        .SUM = 0
        .PRODUCT = 1
        .MIN = 2
        .MAX = 3
        .BOR = 7
        .BAND = 8
        .BXOR = 9
        .AVG = 10
        class BaguaProcessGroupPatch
        .bagua_patch(stream=None)
        .bagua_pg
        .bagua_get_global_communicator()
        .bagua_get_inter_node_communicator()
        .bagua_get_intra_node_communicator()
        BaguaProcessGroup(ranks, stream, group_name)
        .get_global_communicator()
        .get_inter_node_communicator()
        .get_intra_node_communicator()
        is_initialized()
        _get_default_group()
        get_backend(model_name)
        new_group(ranks=None, stream=None)
        from_torch_group(group, stream=None)
        get_communicator(group_name, comm_name)
        _rank_not_in_comm(comm=None)
        _rank_not_in_group(group=None)
        init_process_group(store=None, rank=-1, world_size=-1, local_world_size=-1)
        send(tensor, dst, comm=None)
        recv(tensor, src, comm=None)
        broadcast_coalesced(tensors, src=0, comm=None)
        broadcast_object(obj, src=0, comm=None)
        broadcast(tensor, src=0, comm=None)
        reduce(send_tensor, recv_tensor, dst, op=ReduceOp.SUM, comm=None)
        reduce_inplace(tensor, dst, op=ReduceOp.SUM, comm=None)
        allreduce_coalesced_inplace(tensors, op=ReduceOp.SUM, comm=None)
        allreduce(send_tensor, recv_tensor, op=ReduceOp.SUM, comm=None)
        allreduce_inplace(tensor, op=ReduceOp.SUM, comm=None)
        allgather(send_tensor, recv_tensor, comm=None)
        allgather_inplace(tensor, comm=None)
        gather(send_tensor, recv_tensor, dst, comm=None)
        gather_inplace(tensor, count, dst, comm=None)
        scatter(send_tensor, recv_tensor, src, comm=None)
        scatter_inplace(tensor, count, src, comm=None)
        reduce_scatter(send_tensor, recv_tensor, op=ReduceOp.SUM, comm=None)
        reduce_scatter_inplace(tensor, op=ReduceOp.SUM, comm=None)
        alltoall(send_tensor, recv_tensor, comm=None)
        alltoall_inplace(tensor, comm=None)
        alltoall_v(send_tensor, send_counts, send_displs, recv_tensor, recv_counts, recv_displs, comm=None)
        alltoall_v_inplace(tensor, counts, displs, comm=None)
        barrier(comm=None)
        class comm
        .WORLD
        class CommMember
        .WORLD
        .NON_COMM_MEMBER
        broadcast_nccl_unique_id(comm_key, root)
        run_flask_app(port)
        start_autotune_server(service_port)
        get_hyperparameters_service_client()
    """
    ),
    "tensor": (
        """
        class BaguaTensor
        .is_bagua_tensor()
        .ensure_bagua_tensor(name=None, module_name=None, getter_closure=None, setter_closure=None)
        .to_bagua_tensor(name=None, module_name=None, getter_closure=None, setter_closure=None)
        .bagua_getter_closure()
        .bagua_setter_closure(tensor)
        .bagua_backend_tensor()
        .bagua_ensure_grad()
        .bagua_mark_communication_ready()
        .bagua_mark_communication_ready_without_synchronization()
        .bagua_set_storage(storage, storage_offset=0)
    """
    ),
    "bucket": (
        """
        BaguaBucket(tensors, name, flatten, alignment=1)
        .flattened_tensor()
        .check_flatten()
        .append_python_op(python_function, group=None)
        .append_centralized_synchronous_op(hierarchical=False, average=True, scattergather=False, compression=None, \
            group=None)
        .append_decentralized_synchronous_op(peer_weight, hierarchical=True, peer_selection_mode='all', group=None)
        .append_low_precision_decentralized_synchronous_op(weight, left_peer_weight, right_peer_weight, hierarchical=True, \
            compression='MinMaxUInt8', group=None)
        .append_asynchronous_model_average_op(peer_selection_mode, group=None)
        .clear_ops()
        .bytes()
    """
    ),
    "distributed": (
        """
        class BaguaModule
        .with_bagua(optimizers, algorithm, process_group=None, do_flatten=True)
        .bagua_module_name
        .bagua_algorithm
        .bagua_optimizers
        .bagua_buckets
    """
    ),
    "data_parallel": (
        """
        DistributedDataParallel
    """
    ),
    "data_parallel.bagua_distributed": (
        """
        BaguaDistributedDataParallel(module, optimizers, algorithm, process_group, bagua_module_name=None, \
            gradient_as_bucket_view=True, find_unused_parameters=False)
        .bagua_build_params()
    """
    ),
    "data_parallel.functional": (
        """
        class ReduceOp
        .SUM = 0
        .PRODUCT = 1
        .MIN = 2
        .MAX = 3
        .BOR = 7
        .BAND = 8
        .BXOR = 9
        .AVG = 10
        torch_reduce_op_to_bagua(op)
        all_reduce(tensor, op=dist.ReduceOp.SUM, group=dist.group.WORLD)
        class _AllReduce
        .forward(ctx, op, group, tensor)
        .backward(ctx, grad_output)
    """
    ),
    "data_parallel.distributed": (
        """
        DistributedDataParallel_V1_9_0_Interface()
        .no_sync()
        .forward(*inputs, **kwargs)
        .scatter(inputs, kwargs, device_ids)
        .to_kwargs(inputs, kwargs, device_id)
        .gather(outputs, output_device)
        .train(mode=True)
        .join(divide_by_initial_world_size=True, enable=True, throw_on_early_termination=False)
        .register_comm_hook(state, hook)
        .will_sync_module_buffers()
        to_bagua_process_group(process_group=None)
        DistributedDataParallel_V1_9_0(module, device_ids=None, output_device=None, dim=0, broadcast_buffers=True, \
            process_group=None, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, \
            gradient_as_bucket_view=True, optimizers=[], algorithm=GradientAllReduceAlgorithm())
        .require_backward_grad_sync
        .parameters_to_ignore
        .forward(*inputs, **kwargs)
        .no_sync()
        .bagua_algorithm
        .bagua_optimizers
        .bagua_buckets
        DistributedDataParallel(module, device_ids=None, output_device=None, dim=0, broadcast_buffers=True, \
            process_group=None, bucket_cap_mb=25, find_unused_parameters=False, check_reduction=False, \
            gradient_as_bucket_view=True, optimizers=[], algorithm=GradientAllReduceAlgorithm())
    """
    ),
    "algorithms": (
        """
        Algorithm
        AlgorithmImpl
        GlobalAlgorithmRegistry
        gradient_allreduce
        bytegrad
        decentralized
        q_adam
        async_model_average
    """
    ),
    "algorithms.base": (
        """
        class Algorithm
        .reify(process_group)
        .init(name, **kwargs)
        AlgorithmImpl(process_group)
        .need_reset()
        .init_tensors(bagua_ddp)
        .tensors_to_buckets(tensors, do_flatten)
        .init_forward_pre_hook(bagua_ddp)
        .init_backward_hook(bagua_ddp)
        .init_post_backward_hook(bagua_ddp)
        .init_post_optimizer_step_hook(bagua_ddp)
        .init_operations(bagua_ddp, bucket)
        class _AlgorithmRegistry
        .register(name, algorithm, description=None)
        .get(name)
        .available_algorithms()
        GlobalAlgorithmRegistry
    """
    ),
    "algorithms.gradient_allreduce": (
        """
        GradientAllReduceAlgorithmImpl(process_group, hierarchical=False, average=True)
        .init_operations(_, bucket)
        GradientAllReduceAlgorithm(hierarchical=False, average=True)
        .reify(process_group)
    """
    ),
    "algorithms.bytegrad": (
        """
        ByteGradAlgorithmImpl(process_group, hierarchical=True, average=True)
        .tensors_to_buckets(tensors, do_flatten)
        .init_operations(bagua_ddp, bucket)
        ByteGradAlgorithm(hierarchical=True, average=True)
        .reify(process_group)
    """
    ),
    "algorithms.decentralized": (
        """
        DecentralizedAlgorithmImpl(process_group, hierarchical=True, peer_selection_mode='all', communication_interval=1)
        .init_tensors(bagua_ddp)
        .tensors_to_buckets(tensors, do_flatten)
        .init_forward_pre_hook(bagua_ddp)
        .init_backward_hook(bagua_ddp)
        .init_post_backward_hook(bagua_ddp)
        .init_operations(bagua_ddp, bucket)
        LowPrecisionDecentralizedAlgorithmImpl(process_group, hierarchical=True, communication_interval=1)
        .init_tensors(bagua_ddp)
        .init_backward_hook(bagua_ddp)
        .init_post_backward_hook(bagua_ddp)
        .init_post_optimizer_step_hook(bagua_ddp)
        .init_operations(bagua_ddp, bucket)
        DecentralizedAlgorithm(hierarchical=True, peer_selection_mode='all', communication_interval=1)
        .reify(process_group)
        LowPrecisionDecentralizedAlgorithm(hierarchical=True, communication_interval=1)
        .reify(process_group)
    """
    ),
    "algorithms.q_adam": (
        """
        QAdamOptimizer(params, lr=0.001, warmup_steps=100, betas=(0.9, 0.999), eps=1e-08, weight_decay=0.0)
        .step(closure=None)
        QAdamAlgorithmImpl(process_group, q_adam_optimizer, hierarchical=True)
        .optimizer_step_id
        .need_reset()
        .init_tensors(bagua_ddp)
        .tensors_to_buckets(tensors, do_flatten)
        .init_operations(bagua_ddp, bucket)
        .init_backward_hook(bagua_ddp)
        QAdamAlgorithm(q_adam_optimizer, hierarchical=True)
        .reify(process_group)
    """
    ),
    "algorithms.async_model_average": (
        """
        AsyncModelAverageAlgorithmImpl(process_group, peer_selection_mode='all', sync_interval_ms=500, warmup_steps=0)
        .tensors_to_buckets(tensors, do_flatten)
        .init_tensors(bagua_ddp)
        .init_forward_pre_hook(bagua_ddp)
        .init_backward_hook(bagua_ddp)
        .init_post_backward_hook(bagua_ddp)
        .need_reset()
        .init_operations(bagua_ddp, bucket)
        .abort(bagua_ddp)
        .resume(bagua_ddp)
        AsyncModelAverageAlgorithm(peer_selection_mode='all', sync_interval_ms=500, warmup_steps=0)
        .reify(process_group)
    """
    ),
    "checkpoint": (
        """
        save_checkpoint
        load_checkpoint
    """
    ),
    "contrib": (
        """
        fuse_optimizer
        LoadBalancingDistributedSampler
        LoadBalancingDistributedBatchSampler
        CacheLoader
        CachedDataset
    """
    ),
    "contrib.cache_loader": (
        """
        CacheLoader(backend='redis', dataset_name='', writer_buffer_size=1, **kwargs)
        .get(key, load_fn)
        .num_keys()
        serialize(input)
        deserialize(input)
        BatchFetcher(store, read_buffer_size, writer_buffer_size)
        .read(key)
        .write(key, value)
        .write_post_read()
        .flush_write_map()
    """
    ),
    "contrib.cached_dataset": (
        """
        CachedDataset(dataset, backend='redis', dataset_name='', writer_buffer_size=20, **kwargs)
    """
    ),
    "contrib.load_balancing_data_loader": (
        """
        LoadBalancingDistributedSampler(dataset, complexity_fn, num_replicas=None, rank=None, shuffle=True, seed=0, \
            drop_last=False, random_level=0)
        .shuffle_chunks()
        .set_epoch(epoch)
        LoadBalancingDistributedBatchSampler(sampler, batch_fn, drop_last=False)
        .generate_batches()
        .set_epoch(epoch)
    """
    ),
    "contrib.fuse.optimizer": (
        """
        fuse_optimizer(optimizer, do_flatten=True, check_flatten=True)
        is_fused_optimizer(optimizer)
        fuse_step(optimizer, closure=None)
        flatten_tensors_with_closure(tensors, getter_closure, setter_closure)
        flatten_params_and_states(optimizer)
        calculate_mutual_groups(tensors_list)
        group_tensors(tensors, indices)
        infer_state_tensors(optimizer, fused_param, original_params, name)
        make_optimizer_instance(optimizer)
        do_fuse(optimizer)
        check_optimizer(optimizer)
        sync_param_group_scalars(src_group, dst_group)
        sync_optimizer_state(optimizer)
        get_tensor_state(optimizer, param, name)
        get_optimizer_param_states(optimizer, params)
    """
    ),
    "contrib.utils.store": (
        """
        class Store
        .set(key, value)
        .get(key)
        .num_keys()
        .clear()
        .mset(dictionary)
        .mget(keys)
        .status()
        .shutdown()
        ClusterStore(stores)
        .route(key)
        .set(key, value)
        .get(key)
        .num_keys()
        .clear()
        .mset(dictionary)
        .mget(keys)
        .status()
        .shutdown()
    """
    ),
    "contrib.utils.redis_store": (
        """
        RedisStore(hosts=None, cluster_mode=True, capacity_per_node=107374182400)
        shutdown_redis_server()
        bootstrap_redis_server(capacity_per_node)
        _RedisStore(host, port)
        .set(key, value)
        .get(key)
        .num_keys()
        .clear()
        .mset(dictionary)
        .mget(keys)
        .status()
        .shutdown()
        create_redis_client(host, port)
        start_redis_server_cli(port, capacity, *args)
        get_host_ip()
    """
    ),
    "contrib.sync_batchnorm": (
        """
        SyncBatchNorm(num_features, eps=1e-05, momentum=0.1, affine=True, track_running_stats=True)
        .forward(input)
        .convert_sync_batchnorm(module)
        class _SyncBatchNorm
        .forward(input, weight, bias, running_mean, running_var, eps, momentum)
        .backward(grad_output)
    """
    ),
}
