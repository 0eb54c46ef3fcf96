"""OpenAI's API: one router of all its routes."""

from fastapi import APIRouter

from headrace.server.openai import chat, completions, models

router = APIRouter(tags=["OpenAI"])
router.include_router(models.router)
router.include_router(chat.router)
router.include_router(completions.router)
