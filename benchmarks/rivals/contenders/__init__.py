"""One child process for each trainer that is compared, or for each figure of a device."""
