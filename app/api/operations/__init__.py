"""The operations of the API as its OpenAPI document describes them, one module a noun.

parts          what they are made of: answers, headers, refusals
bodies         what POST takes, from the models that validate it
jobs, notes, service
               the operations themselves
"""
