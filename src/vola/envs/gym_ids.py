"""Gymnasium ids: one explicit call makes ``gymnasium.make`` and ``gymnasium.make_vec`` know the tabletop tasks.

    from vola.envs import gym_ids
    gym_ids.register()
    env = gymnasium.make("vola/Detour-v0", noise=0.15)

Importing this module registers nothing: Gymnasium 1.x loads no plugins by itself, and a library that registers on
import changes a global table behind its user's back.
"""

IDS = (
    "vola/Detour-v0",
    "vola/Push-v0",
    "vola/Compose-v0",
    "vola/Insert-v0",
    "vola/Chase-v0",
    "vola/Gust-v0",
)


def register() -> None:
    """Tell Gymnasium about ``IDS``; calling it again changes nothing."""
    # Imported here, so that the ids can be listed without Gymnasium, which takes longer to load than all of vola.
    from gymnasium.envs import registration

    for env_id in IDS:
        if env_id not in registration.registry:
            registration.register(
                id=env_id,
                entry_point="vola.envs.gym_env:TabletopEnv",
                vector_entry_point="vola.envs.gym_env:TabletopVectorEnv",
                kwargs={"env_id": env_id},
            )
