# Source this: the environment in which Open MPI runs well on one machine, in containers and as root. What is set stays.
#
# Ranks may outnumber cores, so a waiting rank yields its core instead of spinning on it; nothing is bound to a core;
# and only the shared-memory transport is loaded (for several hosts, unset OMPI_MCA_btl and OMPI_MCA_pml).
export OMPI_ALLOW_RUN_AS_ROOT=${OMPI_ALLOW_RUN_AS_ROOT-1} OMPI_ALLOW_RUN_AS_ROOT_CONFIRM=${OMPI_ALLOW_RUN_AS_ROOT_CONFIRM-1}
export OMPI_MCA_rmaps_base_oversubscribe=${OMPI_MCA_rmaps_base_oversubscribe-1}
export OMPI_MCA_mpi_yield_when_idle=${OMPI_MCA_mpi_yield_when_idle-1}
export OMPI_MCA_hwloc_base_binding_policy=${OMPI_MCA_hwloc_base_binding_policy-none}
export OMPI_MCA_pml=${OMPI_MCA_pml-ob1} OMPI_MCA_btl=${OMPI_MCA_btl-vader,self}
